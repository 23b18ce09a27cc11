"""A rank of a preset in this process, with its collector, past the ticks that have no updates."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from unilab_fabric.config import CheckpointConfig, TrainingConfig, build_learner_config, load_run_config, to_plain
from unilab_fabric.hooks.hook import Hooks
from unilab_fabric.learners.learner import OffPolicyConfig
from unilab_fabric.loop.collector import Collector, CollectorConfig
from unilab_fabric.offpolicy.assemble import assemble
from unilab_fabric.offpolicy.runner import OffPolicyRunner
from unilab_fabric.parallel.reduce import Ranks

PRESET = Path(__file__).parents[2] / "configs" / "sac.yaml"
DEADLINE_S = 60.0


@contextlib.contextmanager
def rank(threads: int, *, replay: bool = True) -> Iterator[OffPolicyRunner]:
    """FastSAC on the Go2; `replay`: whether its checkpoints hold the replay."""
    config = load_run_config(PRESET)
    settings = build_learner_config(config.learner)
    collector = Collector(
        CollectorConfig(
            class_path=config.task.class_path, init_args=config.task.init_args, seed=1, num_threads=threads
        ),
        rank=0,
        deadline_s=DEADLINE_S,
    )
    assert isinstance(settings, OffPolicyConfig)
    with tempfile.TemporaryDirectory() as folder:
        try:
            runner = assemble(
                settings,
                collector,
                folder=Path(folder),
                training=TrainingConfig(),
                checkpoint=CheckpointConfig(every=0, replay=replay),
                manifest={"config": to_plain(config)},
                seed=1,
                precision="32-true",
                device=torch.device("cpu"),
                ranks=Ranks(),
                hooks=Hooks([]),
            )
            for _ in range(settings.learning_starts + 5):
                runner.advance()
            yield runner
        finally:
            collector.close()
