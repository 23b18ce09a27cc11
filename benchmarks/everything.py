"""Runs every benchmark, one after the other, and gathers what they write; `tox -e bench` calls it.

    python benchmarks/everything.py [--output FOLDER] [--only NAME ...] [--threshold 1.7]

In under 20 minutes on two cores. One that fails does not keep the others from running. Each writes its JSON and all
that it prints into the folder. Exit status 0: all have run, and two devices reach the threshold; 1: they miss it; 2:
one has failed, or was not done in time.
"""

import argparse
import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

HERE = Path(__file__).parent
MISSED, FAILED = 1, 2
_PATIENCE_S = 30.0


@dataclass(frozen=True)
class Benchmark:
    """A script of this folder and how it is called here."""

    script: str
    arguments: tuple[str, ...]
    deadline_s: float
    """Seconds [s] after which it is ended."""
    needs_cuda: bool = False

    @property
    def name(self) -> str:
        """Without the suffix."""
        return self.script.removesuffix(".py")


SHORT = 180.0
ALL = [
    Benchmark("scaling.py", ("--env_steps=200000",), 780.0),
    Benchmark("environment.py", (), SHORT),
    Benchmark("learner_update.py", ("--threads=1", "--quick"), SHORT),
    Benchmark("ppo_iteration.py", ("--quick",), SHORT),
    Benchmark("collectives.py", (), SHORT),
    Benchmark("hand_over.py", (), SHORT),
    Benchmark("replay.py", ("--threads=1",), SHORT),
    Benchmark("checkpoint.py", (), SHORT),
    Benchmark("start_up.py", ("--repeats=2",), SHORT),
    Benchmark("time_to_return.py", ("--seeds=1", "--fit", "--training.max_env_steps=1000000"), 240.0),
    Benchmark("tick_timing.py", (), SHORT),
    Benchmark("cuda_cycle.py", (), 600.0, needs_cuda=True),
]


@dataclass(frozen=True)
class Outcome:
    """What became of one."""

    name: str
    status: int | None
    """Exit status; None where it was ended for its deadline."""
    seconds: float
    skipped: str = ""
    """Why it was not run."""

    @property
    def text(self) -> str:
        """One line."""
        if self.skipped:
            return f"{self.name}: skipped, {self.skipped}"
        words = {0: "done", MISSED: "missed its bar", None: "not done in time"}
        said = words.get(self.status, f"failed ({self.status})")
        return f"{self.name}: {said}, {self.seconds:.0f} s"


def run(one: Benchmark, output: Path, more: Sequence[str] = ()) -> Outcome:
    """One benchmark as a process; what it prints goes to the terminal and to a file."""
    if one.needs_cuda and not torch.cuda.is_available():
        return Outcome(one.name, 0, 0.0, skipped="there is no CUDA device")
    # what follows --fit is for every run
    arguments = [f"--json={output / one.name}.json", *more, *one.arguments]
    command = [sys.executable, str(HERE / one.script), *arguments]
    print(f"\n=== {one.script} {' '.join(one.arguments)}", flush=True)
    started = time.monotonic()
    file = output / f"{one.name}.txt"
    with file.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, preexec_fn=_heed_interrupts)
        try:
            status: int | None = process.wait(one.deadline_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(process)
    print(file.read_text(errors="replace"), end="", flush=True)
    if status == MISSED and not (output / f"{one.name}.json").exists():
        status = FAILED  # an exception has the same status, but leaves no figures
    return Outcome(one.name, status, time.monotonic() - started)


def _heed_interrupts() -> None:
    """In a job that a shell has put into the background SIGINT is ignored, and so in all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """As Ctrl+C does, so that it ends what it has started; then by force."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
    process.kill()
    process.wait()


def exit_status(outcomes: Sequence[Outcome]) -> int:
    """2 where one has failed or was late, else 1 where one has missed its bar."""
    if any(one.status not in (0, MISSED) for one in outcomes):
        return FAILED
    return max((one.status or 0 for one in outcomes), default=0)


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, help="folder of the results; default: a new one in runs/")
    parser.add_argument("--only", nargs="+", choices=[one.name for one in ALL], help="these alone")
    parser.add_argument("--threshold", type=float, default=1.7, help="ratio that two devices must reach in scaling.py")
    settings = parser.parse_args(argv)
    output: Path = (settings.output or Path("runs") / f"bench-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    output.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for one in ALL:
        if settings.only and one.name not in settings.only:
            continue
        more = [f"--threshold={settings.threshold}", f"--output={output / 'scaling'}"] if one.name == "scaling" else []
        outcomes.append(run(one, output, more))
    print("\n" + "\n".join(one.text for one in outcomes) + f"\nresults in {output}")
    told = [asdict(one) for one in outcomes]
    (output / "everything.json").write_text(json.dumps(told, indent=2) + "\n")
    return exit_status(outcomes)


if __name__ == "__main__":
    sys.exit(main())
