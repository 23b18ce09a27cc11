"""What does it cost that every tick's time is split into its phases, as a share of the tick?

The tick is one of configs/sac.yaml, timed as a run has it. The cost is that of all readings of the clock of one tick,
the collector's and those around all-reduces included, around nothing and many times over: far below what two runs
differ by.

    python benchmarks/tick_timing.py [--json PATH] [--quick]
"""

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from shared.timing import in_turn, machine, table

from unilab_fabric.config import CheckpointConfig, TrainingConfig, build_learner_config, load_run_config
from unilab_fabric.hooks.hook import Hooks
from unilab_fabric.learners.learner import OffPolicyConfig
from unilab_fabric.loop.collector import Collector, CollectorConfig
from unilab_fabric.loop.phases import COLLECTOR_PHASES
from unilab_fabric.offpolicy.assemble import assemble
from unilab_fabric.offpolicy.runner import OffPolicyRunner
from unilab_fabric.parallel.reduce import Ranks

PRESET = Path(__file__).parents[1] / "configs" / "sac.yaml"
TICK, TIMING = "a tick", "its timing, 1000 times"
_TIMES = 1000
_TIMED = ("wait", "commit", "act", "update")
_ALL_REDUCES = 2
_COLLECTOR_READINGS = 6


@contextlib.contextmanager
def rank(threads: int) -> Iterator[OffPolicyRunner]:
    """A rank of the preset, alone, past the ticks without updates."""
    config = load_run_config(PRESET)
    settings = build_learner_config(config.learner)
    collector = Collector(
        CollectorConfig(
            class_path=config.task.class_path, init_args=config.task.init_args, seed=1, num_threads=threads
        ),
        rank=0,
        deadline_s=60.0,
    )
    assert isinstance(settings, OffPolicyConfig)
    with tempfile.TemporaryDirectory() as folder:
        try:
            runner = assemble(
                settings,
                collector,
                folder=Path(folder),
                training=TrainingConfig(),
                checkpoint=CheckpointConfig(every=0),
                manifest={},
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


def measure(threads: int, repeats: int, seconds: float) -> dict[str, float]:
    """Prints and returns the share."""

    def timing() -> None:
        for _ in range(_TIMES):
            for phase in _TIMED:
                with runner._timed(phase):
                    pass
            for _ in range(_ALL_REDUCES):
                with waits.counted():
                    pass
            for _ in range(_COLLECTOR_READINGS):
                time.perf_counter()
            runner._reporter.count_collector(seconds_of_collector)

    waits, seconds_of_collector = Ranks().waits, np.zeros(len(COLLECTOR_PHASES))
    with rank(threads) as runner:
        times = in_turn({TICK: runner.advance, TIMING: timing}, repeats, seconds)
    numbers = table("sac.yaml, one rank", times, TICK)
    share = numbers[TIMING]["ms"] / _TIMES / numbers[TICK]["ms"]
    print(f"timing takes {100 * share:.3f}% of a tick")
    return {"tick_ms": numbers[TICK]["ms"], "timing_ms": numbers[TIMING]["ms"] / _TIMES, "share": share}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--threads", type=int, default=1, help="threads of physics and learner")
    parser.add_argument("--quick", action="store_true", help="few short repeats: shows that it runs, not how much")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    described = machine()
    print(f"{described['processor']}, {described['threads']} threads, torch {described['torch']}")
    numbers = measure(arguments.threads, *((1, 0.1) if arguments.quick else (9, 1.0)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, **numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
