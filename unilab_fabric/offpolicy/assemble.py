"""The parts of one rank of off-policy training, put together."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from unilab_fabric.config import CheckpointConfig, TrainingConfig
from unilab_fabric.hooks.hook import Hooks
from unilab_fabric.learners.learner import OffPolicyConfig
from unilab_fabric.loop.checkpoints import RunCheckpoints
from unilab_fabric.loop.collector import Collector
from unilab_fabric.loop.nonfinite import NonfiniteWatch
from unilab_fabric.loop.report import Reporter
from unilab_fabric.loop.transfer import choose_transfer
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.offpolicy.graphs import CudaGraph, GraphedBlock
from unilab_fabric.offpolicy.replay import Replay
from unilab_fabric.offpolicy.runner import OffPolicyRunner
from unilab_fabric.parallel.reduce import Ranks


def assemble(
    settings: OffPolicyConfig,
    collector: Collector,
    *,
    folder: Path,
    training: TrainingConfig,
    checkpoint: CheckpointConfig,
    manifest: dict[str, Any],
    seed: int,
    precision: str,
    device: torch.device,
    ranks: Ranks,
    hooks: Hooks,
) -> OffPolicyRunner:
    """A rank's runner with its learner and replay, once its collector has connected.

    `seed` is the job's, `precision` is resolved; the preflight has checked the settings against the task.
    """
    spec = collector.connect()
    ticks = -(-training.max_env_steps // (spec.num_envs * ranks.world_size))
    learner = settings.build(
        spec,
        device=device,
        precision=precision,
        ranks=ranks,
        seed=seed + ranks.rank,
        total_updates=max(1, ticks - settings.learning_starts) * settings.updates_per_tick,
    )
    replay = Replay(
        spec,
        ticks=settings.replay_ticks,
        n_step=settings.n_step,
        discount=settings.discount,
        device=device,
        seed=seed + ranks.rank,
    )
    graphed = None
    if device.type == "cuda" and training.cuda_graphs and not training.debug_collectives:
        generators = [replay.generator, *learner.generators.values()]
        graphed = GraphedBlock(partial(CudaGraph, generators), ranks, device)
    cycle = Cycle(learner, replay, learning_starts=settings.learning_starts, graphed=graphed)
    reporter = Reporter(spec.metrics, learner, ranks)
    checkpoints = RunCheckpoints(
        folder=folder,
        settings=checkpoint,
        manifest={"world_size": ranks.world_size, "seed": seed, **manifest},
        collector=collector,
        learner=learner,
        replay=replay,
        counter=cycle,
        reporter=reporter,
        ranks=ranks,
        num_envs=spec.num_envs,
    )
    return OffPolicyRunner(
        folder=folder,
        training=training,
        checkpoints=checkpoints,
        collector=collector,
        learner=learner,
        replay=replay,
        cycle=cycle,
        nonfinite=NonfiniteWatch(learner, replay.nonfinite, ranks, folder, training.max_skipped_updates),
        transfer=choose_transfer(collector.slots, device, ranks),
        reporter=reporter,
        ranks=ranks,
        hooks=hooks,
    )
