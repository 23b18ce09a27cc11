"""How long is it from the command to the first tick, beside what importing the libraries takes alone?

    python benchmarks/start_up.py [--devices 1 2] [--json PATH] [--repeats N]

Runs `fit --config sac.yaml` for a few ticks and reads `first_tick_s` of run_summary.json: from the start of the command
until every part has done a tick, collectors, slots, process group and compiled kernels included. The reference is a
Python that imports torch and mujoco and ends. Files are in the system's cache after the first of all runs, which does
not count.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shared.jobs import Unmeasured, fit
from shared.run_files import summary
from shared.timing import machine

REFERENCE = "import torch, mujoco"
NUM_ENVS = 256  # of the preset, on each rank
DEADLINE_S = 120.0


def import_s() -> float:
    """Seconds [s] of the reference."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", REFERENCE], check=True, timeout=DEADLINE_S)
    return time.perf_counter() - start


def first_tick_s(folder: Path, name: str, devices: int) -> float:
    """Seconds [s] until a new run's first tick is done. Raises Unmeasured."""
    arguments = [
        "--config=sac.yaml",
        f"--devices={devices}",
        "--training.accelerator=cpu",
        f"--training.max_env_steps={NUM_ENVS * devices}",
        f"--training.log_root={folder}",
        f"--training.run_name={name}",
        "--logger=CSVLogger",
        "--evaluation.episodes=0",
        "--checkpoint.replay=false",
    ]
    fit(arguments, folder / f"{name}-output", None, DEADLINE_S)
    seconds = summary(folder / name).get("first_tick_s")
    if not isinstance(seconds, float):
        raise Unmeasured(f"the run {name} has no first_tick_s")
    return seconds


def measure(devices: Sequence[int], repeats: int) -> dict[str, dict[str, float]]:
    """Prints and returns medians, and how many times the reference they are within a repeat. Raises Unmeasured."""
    times: dict[str, list[float]] = {REFERENCE: [], **{_name(count): [] for count in devices}}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(repeats + 1):
            found = {REFERENCE: import_s()}
            for count in devices:
                found[_name(count)] = first_tick_s(Path(folder), f"{count}-{repeat}", count)
            if repeat > 0:
                for name, seconds in found.items():
                    times[name].append(seconds)
    numbers = {}
    print(f"\n{'':24}{'s':>8}{'times the reference':>22}")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(own, times[REFERENCE], strict=True))
        numbers[name] = {"s": statistics.median(own), "times_the_reference": ratio}
        print(f"{name:24}{numbers[name]['s']:8.2f}{ratio:22.2f}")
    return numbers


def _name(devices: int) -> str:
    return f"{devices} rank{'s' if devices > 1 else ''}"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2 where a figure is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args(argv)
    described = machine()
    print(f"{described['processor']}, torch {described['torch']}")
    try:
        numbers = measure(arguments.devices, arguments.repeats)
    except Unmeasured as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, "start_up": numbers}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
