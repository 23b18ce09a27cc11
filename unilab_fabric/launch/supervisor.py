"""The launcher of a job of several ranks on this machine: starts them all, sees the first one fail, ends them all.

It is a process of its own, without torch and without a collective it could be blocked in, so it can always act: on a
signal, on a rank that was killed or stopped, rank 0 included. Each rank reports through a pipe how it ended; a rank
that fails because another one has gone says so, and the first failure that is not such a consequence is the cause.
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from unilab_fabric.launch.failure import Failure, failure_of_exit
from unilab_fabric.launch.signals import STOP_SIGNALS
from unilab_fabric.loop.collector import is_stopped

_POLL_S = 0.02
_CAUSE_S = 2.0
"""Seconds [s] to look for a cause after a rank has failed as a consequence of another one's end."""
_ASK_S = 4.0
"""Seconds [s] between asking a rank to end and killing it."""


class Report:
    """A rank's end of its pipe to the launcher."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def done(self, status: int) -> None:
        """The rank has come to its end in good order: 0, or 128 plus the number of the signal that stopped the run."""
        self._send({"done": status})

    def failed(self, failure: Failure) -> None:
        """The rank has failed."""
        self._send({"failed": asdict(failure)})

    def _send(self, message: Mapping[str, Any]) -> None:
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._descriptor, data) :]


@contextmanager
def _held_to(cpus: Sequence[int] | None) -> Iterator[None]:
    """A process that is started within it inherits these cores, before a library in it makes a thread."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass
class _Rank:
    process: subprocess.Popen[bytes]
    pipe: int
    log: Path | None
    heard: bytes = b""
    done: int | None = None
    failures: list[Failure] = field(default_factory=list)

    def listen(self) -> None:
        """Takes in what the rank has reported by now."""
        while data := self._read():
            self.heard += data
        *lines, self.heard = self.heard.split(b"\n")
        for message in map(json.loads, lines):
            if "done" in message:
                self.done = message["done"]
            else:
                figures = message["failed"]
                self.failures.append(Failure(**{**figures, "last_lines": tuple(figures["last_lines"])}))

    def _read(self) -> bytes:
        try:
            return os.read(self.pipe, 65536)
        except BlockingIOError:
            return b""


class Supervisor:
    """The ranks of this machine and their fate."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        environments: Mapping[int, Mapping[str, str]],
        cpus: Sequence[Sequence[int]] | None,
        folder: Path,
        deadline_s: float,
    ) -> None:
        """Starts one process for each rank of `environments`, `command(descriptor of its pipe)`, held to its `cpus`.

        The output of rank 0 goes where ours goes, that of the others to `rank-<r>.log` in `folder`. A rank that has
        not ended `deadline_s` [s] after another one was done has failed. Call it from the main thread: the ranks end
        with the thread that started them.
        """
        self._deadline_s = deadline_s
        self._ranks: dict[int, _Rank] = {}
        self._signals: list[int] = []
        self._forwarded = 0
        self._before = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        for rank, environment in environments.items():
            log = folder / f"rank-{rank}.log" if rank else None
            with _held_to(None if cpus is None else cpus[rank]):
                self._ranks[rank] = self._start(command, environment, log)

    def run(self) -> int | Failure:
        """Waits until the job is over: its exit status, or the failure that ended it; no rank is left then."""
        try:
            failure = self._watch()
            if failure is None:
                return self._status()
            self._end()
            return self._status() if self._stopped() and failure.consequence else failure
        finally:
            self._kill()
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _start(
        self, command: Callable[[int], Sequence[str]], environment: Mapping[str, str], log: Path | None
    ) -> _Rank:
        ours, theirs = os.pipe()
        os.set_blocking(ours, False)
        output = None if log is None else log.open("ab")
        try:
            process = subprocess.Popen(
                command(theirs),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                pass_fds=[theirs],
                start_new_session=True,  # Ctrl+C reaches us alone, and every rank once, through us
            )
        finally:
            os.close(theirs)
            if output is not None:
                output.close()
        return _Rank(process, ours, log)

    def _watch(self) -> Failure | None:
        """Until all ranks are done, or one has failed."""
        over_at = cause_at = None
        while True:
            self._listen()
            if len(self._signals) > 1:
                self._kill()
                return None
            self._forward()
            failures = self._failures()
            causes = [failure for failure in failures if not failure.consequence]
            if causes:
                return causes[0]
            if failures:
                cause_at = cause_at or time.monotonic() + _CAUSE_S
                if time.monotonic() > cause_at or not self._running():
                    return self._with_suspects(failures[0])
            elif not self._running():
                return None
            if any(rank.done is not None for rank in self._ranks.values()):
                over_at = over_at or time.monotonic() + self._deadline_s
                if time.monotonic() > over_at:
                    return self._late()
            time.sleep(_POLL_S)

    def _failures(self) -> list[Failure]:
        """Of all ranks, as far as they are known, a rank's own report before what its exit status says."""
        found = []
        for number, rank in self._ranks.items():
            returncode = rank.process.poll()
            if rank.failures:
                found.append(rank.failures[0])
            elif returncode is not None and rank.done is None:
                rank.listen()  # what it wrote between our last look and its end
                if -returncode in STOP_SIGNALS:  # so early that it had no handler yet
                    rank.done = 128 - returncode
                elif rank.failures:
                    found.append(rank.failures[0])
                elif rank.done is None:
                    found.append(failure_of_exit(number, rank.process.pid, returncode, rank.log))
        return found

    def _with_suspects(self, failure: Failure) -> Failure:
        """A consequence whose cause did not show itself, with what is known of the ranks that still run."""
        states = [
            f"rank {number} (pid {rank.process.pid}) {'was stopped' if is_stopped(rank.process.pid) else 'still ran'}"
            for number, rank in self._ranks.items()
            if rank.process.poll() is None and number != failure.rank
        ]
        return replace(failure, reason="; ".join([failure.reason, *states]))

    def _late(self) -> Failure:
        number, rank = next((number, rank) for number, rank in self._ranks.items() if rank.process.poll() is None)
        return Failure(
            rank=number,
            process="rank",
            pid=rank.process.pid,
            exit_status=1,
            reason=f"it has not ended {self._deadline_s:.0f} s after the run was over",
        )

    def _stopped(self) -> bool:
        """Whether somebody asked for the end."""
        return bool(self._signals) or any(rank.done for rank in self._ranks.values())

    def _status(self) -> int:
        """Exit status of a job without a failure: 0, or 128 plus a signal's number."""
        asked = [128 + number for number in self._signals if not all(r.done == 0 for r in self._ranks.values())]
        return max([*asked[:1], *(rank.done or 0 for rank in self._ranks.values())])

    def _on_signal(self, number: int, _: object) -> None:
        self._signals.append(number)

    def _forward(self) -> None:
        """Hands the first signal to every rank, whoever got it."""
        asked = self._signals[0] if self._signals else next((r.done - 128 for r in self._ranks.values() if r.done), 0)
        if asked and not self._forwarded:
            self._forwarded = asked
            for rank in self._running():
                if rank.done is None:
                    rank.process.send_signal(asked)

    def _listen(self) -> None:
        for rank in self._ranks.values():
            rank.listen()

    def _running(self) -> list[_Rank]:
        return [rank for rank in self._ranks.values() if rank.process.poll() is None]

    def _end(self) -> None:
        """Asks every rank to end, then kills those that have not; one that is stopped would not hear."""
        for rank in self._running():
            rank.process.kill() if is_stopped(rank.process.pid) else rank.process.terminate()
        deadline = time.monotonic() + _ASK_S
        while self._running() and time.monotonic() < deadline and len(self._signals) < 2:
            time.sleep(_POLL_S)
        self._kill()

    def _kill(self) -> None:
        for rank in self._running():
            rank.process.kill()
            rank.process.wait()
        self._listen()
