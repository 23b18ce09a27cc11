"""The parts of one rank of on-policy training, put together."""

from pathlib import Path
from typing import Any

import torch

from unilab_fabric.config import CheckpointConfig, TrainingConfig
from unilab_fabric.hooks.hook import Hooks
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.loop.checkpoints import RunCheckpoints
from unilab_fabric.loop.collector import Collector
from unilab_fabric.loop.nonfinite import NonfiniteWatch
from unilab_fabric.loop.report import Reporter
from unilab_fabric.loop.transfer import choose_transfer
from unilab_fabric.onpolicy.rsl_rl_files import read_model
from unilab_fabric.onpolicy.runner import OnPolicyRunner
from unilab_fabric.parallel.reduce import Ranks


def assemble(
    settings: PPO,
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
) -> OnPolicyRunner:
    """A rank's runner with its learner, once its collector has connected.

    `seed` is the job's, `precision` is resolved; the preflight has checked the settings against the task.
    """
    spec = collector.connect()
    learner = settings.build(
        spec, device=device, precision=precision, ranks=ranks, seed=seed + ranks.rank, total_updates=1
    )
    if settings.start_from is not None:
        read_model(Path(settings.start_from), learner)
    reporter = Reporter(spec.metrics, learner, ranks)
    checkpoints = RunCheckpoints(
        folder=folder,
        settings=checkpoint,
        manifest={"world_size": ranks.world_size, "seed": seed, **manifest},
        collector=collector,
        learner=learner,
        replay=None,
        counter=learner,
        reporter=reporter,
        ranks=ranks,
        num_envs=spec.num_envs,
    )
    return OnPolicyRunner(
        folder=folder,
        training=training,
        checkpoints=checkpoints,
        collector=collector,
        learner=learner,
        nonfinite=NonfiniteWatch(learner, learner.nonfinite, ranks, folder, training.max_skipped_updates),
        transfer=choose_transfer(collector.slots, device, ranks),
        reporter=reporter,
        ranks=ranks,
        hooks=hooks,
    )
