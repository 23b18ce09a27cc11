"""Runs `fit` as a user does, on chosen cores, and watches how much memory all its processes take."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
OUTPUT = "output.txt"
_SAMPLE_S = 1.0
_LOOK_S = 0.05


class Unmeasured(Exception):
    """Something that a figure needs is missing; the text says of which run, which rank and which file."""


@dataclass(frozen=True)
class Ended:
    """A command that has ended with status 0."""

    wall_s: float
    """Seconds [s] from its start to its end."""
    peak_bytes: int | None
    """Largest memory of all its processes together, of the moments looked at; None where the system does not tell."""


def fit(arguments: Sequence[str], folder: Path, cpus: Collection[int] | None, deadline_s: float) -> Ended:
    """Runs `python -m unilab_fabric fit` on these cores; what it prints goes into `folder`.

    Raises Unmeasured where it fails, or has not ended in time.
    """
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / OUTPUT
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "unilab_fabric", "fit", *arguments]
    started = time.monotonic()
    with output.open("wb") as file, on_cores(cpus):
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=variables, start_new_session=True
        )
    try:
        peak = _peak_until_end(process, started + deadline_s)
    finally:
        if process.poll() is None:
            _end(process)
    if peak is _LATE:
        raise Unmeasured(f"it has not ended within {deadline_s:.0f} s; see {output}")
    if process.returncode:
        lines = output.read_text(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "nothing")
        raise Unmeasured(f"it ended with status {process.returncode}; see {output}, whose last line is: {last}")
    return Ended(time.monotonic() - started, peak or None)


@contextlib.contextmanager
def on_cores(cpus: Collection[int] | None) -> Iterator[None]:
    """What starts within it may use these cores alone; None leaves it all of them."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def tree(pid: int) -> list[int]:
    """A process and all that descend from it; it alone where the system does not tell."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found = [pid]
    for one in found:  # grows while it is walked
        found += children.get(one, [])
    return found


def memory(pids: Sequence[int]) -> int:
    """Bytes of some processes together, a page that several share counted once (PSS); 0 where nothing tells."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
                if line.startswith("Pss:"):
                    total += 1024 * int(line.split()[1])
    return total


_LATE = -1


def _peak_until_end(process: "subprocess.Popen[bytes]", deadline: float) -> int:
    peak, look_at = 0, 0.0
    while process.poll() is None:
        now = time.monotonic()
        if now > deadline:
            return _LATE
        if now >= look_at:
            peak, look_at = max(peak, memory(tree(process.pid))), now + _SAMPLE_S
        time.sleep(_LOOK_S)
    return peak


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Asks the command to end, then makes all of its processes."""
    left = tree(process.pid)
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(10)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
