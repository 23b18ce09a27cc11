"""How a failure is described, recorded in `failure.json` and shown; the first one of a job counts."""

import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from unilab_fabric.errors import PeerLost, PeerStalled, UserError, UserErrors
from unilab_fabric.hooks.summary import SUMMARY, write_summary
from unilab_fabric.loop.collector import CollectorFailed

FAILURE = "failure.json"
_LAST_LINES = 30


class FailedAt(Exception):
    """Carries what is known of the run that the exception behind it has ended."""

    def __init__(self, tick: int, folder: Path, end_hooks: Callable[[], None]) -> None:
        """`tick` counts those done, `folder` is what the ranks agreed on, `end_hooks` lets the hooks come to an end."""
        super().__init__(tick, folder)
        self.tick = tick
        self.folder = folder
        self.end_hooks = end_hooks


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The end of one process of a job, and why."""

    rank: int
    process: str
    """`rank` or `collector`."""
    pid: int | None
    """Process id, where it is known."""
    exit_status: int
    """As a shell shows it: 128 plus the number for a signal."""
    reason: str
    """One line, or the text that a UserError prints."""
    tick: int | None = None
    """Ticks done when it happened, where that is known."""
    signal: str | None = None
    """Name of the signal that killed the process."""
    traceback: str = ""
    """The failing process's own."""
    last_lines: tuple[str, ...] = ()
    """What it had written last, where that went to a file."""
    consequence: bool = False
    """Whether another rank must have failed before."""
    host: str = ""
    """Machine."""

    @property
    def is_bad_input(self) -> bool:
        """Whether it is the user's input that was refused, late because a rank had to look."""
        return self.exit_status == 2 and not self.traceback

    def text(self) -> str:
        """What a user reads, the cause last."""
        if self.is_bad_input:
            return self.reason
        at = f", tick {self.tick}" if self.tick is not None else ""
        reason = self.reason if self.reason.startswith("rank ") else f"rank {self.rank}{at}: {self.reason}"
        parts = ["its last words:", *self.last_lines] if self.last_lines else []
        return "\n".join([*parts, self.traceback.rstrip(), reason]).lstrip("\n")


def failure_of(error: Exception, rank: int) -> Failure:
    """Describes the exception that ends this rank."""
    tick = None
    if isinstance(error, FailedAt) and isinstance(error.__cause__, Exception):
        tick, error = error.tick, error.__cause__
    about: dict[str, Any] = {"rank": rank, "tick": tick, "host": socket.gethostname()}
    if isinstance(error, UserError | UserErrors):
        return Failure(**about, process="rank", pid=os.getpid(), exit_status=2, reason=str(error))
    if isinstance(error, CollectorFailed):
        name = signal.Signals(error.status - 128).name if error.status > 128 else None
        return Failure(
            **about,
            process="collector",
            pid=error.pid,
            exit_status=error.status or 1,
            signal=name,
            reason=error.text,
            traceback=error.trace,
        )
    if isinstance(error, PeerStalled):
        return Failure(**{**about, "rank": error.rank}, process="rank", pid=None, exit_status=1, reason=str(error))
    return Failure(
        **about,
        process="rank",
        pid=os.getpid(),
        exit_status=1,
        reason=f"{type(error).__name__}: {error}".partition("\n")[0],
        traceback="".join(traceback.format_exception(error)),
        consequence=isinstance(error, PeerLost),
    )


def failure_of_exit(rank: int, pid: int, returncode: int, log: Path | None) -> Failure:
    """Describes a rank that ended without a word; `returncode` as `subprocess` gives it."""
    name = signal.Signals(-returncode).name if returncode < 0 else None
    reason = f"it was killed by {name}" if name else f"it ended with exit status {returncode} before the run was over"
    return Failure(
        rank=rank,
        process="rank",
        pid=pid,
        exit_status=128 - returncode if returncode < 0 else returncode or 1,
        signal=name,
        reason=reason,
        last_lines=tail(log) if log else (),
        host=socket.gethostname(),
    )


def tail(log: Path) -> tuple[str, ...]:
    """The last lines of a log."""
    return tuple(log.read_text(errors="replace").splitlines()[-_LAST_LINES:]) if log.is_file() else ()


def record(failure: Failure, folder: Path) -> None:
    """Writes `failure.json` and corrects the run's summary, unless a failure of this run stands there already.

    A disk that takes no more must not hide the failure: what cannot be written is said and left.
    """
    figures = {"status": "failed", "time": time.time(), **asdict(failure)}
    if (folder / FAILURE).exists():
        return
    try:
        _write_whole(folder / FAILURE, json.dumps(figures, indent=2) + "\n")
        write_summary(folder, {**_summary(folder), "status": "failed", "reason": failure.reason})
    except OSError as error:
        print(f"warning: {FAILURE} could not be written: {error}", file=sys.stderr)


def _write_whole(file: Path, text: str) -> None:
    """Writes the file whole or not at all."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        part.write_text(text)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)


def show(failure: Failure) -> None:
    """Prints the failure, the last thing of the job."""
    *before, last = failure.text().splitlines()
    mark = "error: " if failure.is_bad_input else ""  # each of its lines is a problem
    print("\n".join([*(mark + line for line in before), f"error: {last}"]), file=sys.stderr, flush=True)


def forget(folder: Path) -> None:
    """Removes what an earlier run in this folder said about its end."""
    for name in (FAILURE, SUMMARY):
        (folder / name).unlink(missing_ok=True)


def _summary(folder: Path) -> Mapping[str, Any]:
    file = folder / SUMMARY
    figures: Mapping[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return figures
