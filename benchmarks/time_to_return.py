"""How long is it from the command until the robot has a return, on one device and on more?

    python benchmarks/time_to_return.py [--learner NAME] [--threshold 250] [--devices 1 2] [--seeds 1 2 3] [--json PATH]

Runs the shipped preset of a learner on the Go2 and reads its event files: the time is from the start of the command to
the first report whose `Train/mean_reward` reaches the threshold. The reference is the run of the same seed on one
device, which has all cores of the machine as the others have; with more devices the job's environments and batch stay
as they are (`training.batch job`). A return that is not reached is an error, and then nothing is claimed at all.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from shared.jobs import Unmeasured, fit
from shared.run_files import RETURN, Series, series, summary
from shared.timing import machine

PRESETS = {"FastSAC": "sac.yaml", "FlashSAC": "flash_sac.yaml", "PPO": "ppo.yaml"}
DEADLINE_S = 900.0


def reached_at(found: dict[str, Series], threshold: float) -> float:
    """Time [s since the epoch] of the first report with this return. Raises Unmeasured where there is none."""
    returns = found.get(RETURN, Series([], []))
    for value, at in zip(returns.values, returns.times, strict=True):
        if value >= threshold:
            return at
    best = f"the best of {len(returns.values)} reports is {max(returns.values, default=0):.1f}"
    best = best if returns.values else "there is no report of it"
    raise Unmeasured(f"no return of {threshold:g} was reached: {best}")


def seconds(folder: Path, settings: argparse.Namespace, devices: int, seed: int) -> float:
    """One run, from its start to the return [s]. Raises Unmeasured, with the name of the run."""
    name = f"{settings.learner}-{devices}-{seed}"
    arguments = [
        f"--config={PRESETS[settings.learner]}",
        f"--devices={devices}",
        f"--training.accelerator={settings.accelerator}",
        f"--seed={seed}",
        "--training.batch=job",
        f"--training.log_root={folder}",
        f"--training.run_name={name}",
        "--logger=TensorBoardLogger",
        "--evaluation.episodes=0",
        "--checkpoint.replay=false",
        *settings.fit,
    ]
    try:
        started = time.time()
        fit(arguments, folder / f"{name}-output", None, DEADLINE_S)
        summary(folder / name)
        return reached_at(series(folder / name), settings.threshold) - started
    except Unmeasured as error:
        raise Unmeasured(f"{name}: {error}") from None


def measure(folder: Path, settings: argparse.Namespace) -> dict[int, dict[str, object]]:
    """Prints and returns, by devices: the times of all seeds, their median, and the median ratio to one device."""
    times: dict[int, list[float]] = {count: [] for count in settings.devices}
    for seed in settings.seeds:
        for count in settings.devices:
            times[count].append(seconds(folder, settings, count, seed))
            print(f"{count} devices, seed {seed}: {times[count][-1]:.1f} s", flush=True)
    numbers: dict[int, dict[str, object]] = {}
    print(f"\n{'devices':>8}{'s':>9}{'ratio':>8}")
    for count, own in times.items():
        median = statistics.median(own)
        ratio = statistics.median(a / b for a, b in zip(times[settings.devices[0]], own, strict=True))
        numbers[count] = {"s": own, "median_s": median, "ratio": ratio}
        print(f"{count:8}{median:9.1f}{ratio:8.2f}")
    return numbers


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status: 2 where a figure is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--learner", choices=PRESETS, default="FastSAC")
    parser.add_argument("--threshold", type=float, default=250.0, help="mean return of the episodes of a report")
    parser.add_argument("--accelerator", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--fit", nargs=argparse.REMAINDER, default=[], help="what follows goes to every fit")
    settings = parser.parse_args(argv)
    settings.devices = sorted({1, *settings.devices})
    described = machine()
    print(f"{described['processor']}, {described['device']}, torch {described['torch']}")
    print(f"{settings.learner} to a return of {settings.threshold:g}")
    try:
        with tempfile.TemporaryDirectory() as folder:
            numbers = measure(Path(folder), settings)
    except Unmeasured as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if settings.json is not None:
        told = {"learner": settings.learner, "threshold": settings.threshold, "seeds": settings.seeds}
        settings.json.write_text(json.dumps({**described, **told, "devices": numbers}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
