"""Whole small runs inside a test, without the command line: one call, one rank."""

import torch

from unilab_fabric.checkpoints import envs_to_resume
from unilab_fabric.config import CheckpointConfig, TrainingConfig
from unilab_fabric.hooks.hook import Hook, Hooks
from unilab_fabric.launch.rank import assembler
from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.loop.collector import Collector, CollectorConfig
from unilab_fabric.parallel.reduce import Ranks

SMALL = FastSAC(
    actor_hidden=(32, 16),
    critic_hidden=(32, 16),
    atoms=21,
    v_min=0.0,
    v_max=10.0,
    batch_size=32,
    updates_per_tick=1,
    actor_every=2,
    replay_ticks=100,
    learning_starts=4,
)


class StopAt(Hook):
    """Asks for the end after a tick."""

    def __init__(self, tick):
        self._tick = tick

    def on_tick_end(self, run):
        if run.tick == self._tick:
            run.stop("the test says so")


def run(
    folder,
    ticks,
    *,
    task="CartpoleSwingup",
    init_args=None,
    learner=SMALL,
    ranks=None,
    seed=3,
    hooks=(),
    resume=None,
    until=None,
    checkpoint=None,
    log_every=10,
    replica_check_every=50,
    manifest=None,
    profile=0,
):
    """Trains for `ticks` in all and returns the runner; `until` stops it after that many."""
    ranks = ranks or Ranks()
    state = resume and envs_to_resume(resume, rank=ranks.rank, world_size=ranks.world_size)
    init_args = {"num_envs": 8} if init_args is None else init_args
    collector = Collector(
        CollectorConfig(
            class_path=task, init_args=init_args, seed=seed + ranks.rank, num_threads=1, state_file=state and str(state)
        ),
        rank=ranks.rank,
        deadline_s=60,
    )
    try:
        runner = assembler(learner)(
            learner,
            collector,
            folder=folder,
            training=TrainingConfig(
                max_env_steps=ticks * init_args["num_envs"] * ranks.world_size,
                log_every=log_every,
                replica_check_every=replica_check_every,
                profile=profile,
            ),
            checkpoint=checkpoint or CheckpointConfig(every=0),
            manifest=manifest or {"config": {}},
            seed=seed,
            precision="32-true",
            device=torch.device("cpu"),
            ranks=ranks,
            hooks=Hooks([*hooks, StopAt(until)]),
        )
        runner.warning = runner.resume(resume) if resume is not None else ""
        runner.run()
        return runner
    finally:
        collector.close()


def weights(runner):
    """A copy of the replicated state."""
    return {name: tensor.clone() for name, tensor in runner._replicated.items()}
