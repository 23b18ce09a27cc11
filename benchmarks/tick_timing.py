"""What does it cost that every tick's time is split into its phases, as a share of the tick?

The tick is one of configs/sac.yaml, timed as a run has it. The cost is that of all readings of the clock of one tick,
the collector's and those around all-reduces included, around nothing and many times over: far below what two runs
differ by.

    python benchmarks/tick_timing.py [--json PATH] [--quick]
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from shared.rank import rank
from shared.timing import in_turn, machine, table

from unilab_fabric.loop.phases import COLLECTOR_PHASES
from unilab_fabric.parallel.reduce import Ranks

TICK, TIMING = "a tick", "its timing, 1000 times"
_TIMES = 1000
_TIMED = ("wait", "commit", "act", "update")
_ALL_REDUCES = 2
_COLLECTOR_READINGS = 6


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
