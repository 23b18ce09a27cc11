"""Starts the other ranks of this machine, sees the first one fail, and ends them all.

Rank 0 runs it in a thread, which goes on while the main thread is blocked in a collective. No torch here: the other
ranks start before rank 0 has loaded it.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

_POLL_S = 0.1
_ASK_S = 3.0
"""Seconds [s] between asking a rank to end and killing it."""


class RankFailed(RuntimeError):
    """A rank ended with a failure; `status` is its exit status as a shell shows it."""

    def __init__(self, rank: int, status: int, log: Path) -> None:
        self.rank = rank
        self.status = status
        self.log = log
        super().__init__(f"rank {rank} {describe_status(status)}; its last words, in {log}:\n{tail(log)}")


def describe_status(status: int) -> str:
    """An exit status in words."""
    if status > 128:
        return f"was killed by {signal.Signals(status - 128).name}"
    return f"ended with exit status {status}"


def tail(log: Path, lines: int = 30) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class Supervisor:
    """The ranks above 0 that this process started; with none of them, every method does nothing."""

    def __init__(
        self, commands: Mapping[int, list[str]], environments: Mapping[int, dict[str, str]], folder: Path
    ) -> None:
        """Starts one process for each rank of `commands`; its output goes to `rank-<r>.log` in `folder`.

        Call it from the main thread: the ranks end with the thread that started them.
        """
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._first_failure: RankFailed | None = None
        self._over = threading.Event()
        for rank, command in commands.items():
            log: IO[bytes]
            with self._log(rank).open("ab") as log:
                self._processes[rank] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environments[rank]
                )

    def watch(self, on_failure: Callable[[RankFailed], None]) -> None:
        """From now on a rank's failure ends the job: the others are ended, `on_failure` runs, this process exits."""
        threading.Thread(target=self._watch, args=(on_failure,), name="supervisor", daemon=True).start()

    def failure(self, within_s: float = 0.0) -> RankFailed | None:
        """The first failure of a rank, waiting up to `within_s` [s] for one to show."""
        deadline = time.monotonic() + within_s
        while self._processes and self._first_failure is None and time.monotonic() < deadline:
            self._look()
            time.sleep(_POLL_S)
        return self._first_failure

    def wait(self) -> None:
        """Waits until all ranks have ended; a late failure is one too. Raises RankFailed."""
        while self._running():
            self._look()
            if self._first_failure:
                break
            time.sleep(_POLL_S)
        self._over.set()
        self._look()
        if self._first_failure:
            self.end()
            raise self._first_failure

    def stop_watching(self) -> None:
        """From now on a rank's failure is the consequence of one that is known."""
        self._over.set()

    def end(self) -> None:
        """Asks every rank to end, then kills those that have not."""
        self._over.set()
        for process in self._running():
            process.terminate()
        deadline = time.monotonic() + _ASK_S
        while self._running() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        self._kill()

    def _watch(self, on_failure: Callable[[RankFailed], None]) -> None:
        while not self._over.wait(_POLL_S):
            self._look()
            if self._first_failure:
                self._kill()
                on_failure(self._first_failure)
                sys.stderr.flush()
                os._exit(self._first_failure.status)  # the main thread may be blocked in a collective for ever

    def _kill(self) -> None:
        for process in self._running():
            process.kill()
            process.wait()

    def _look(self) -> None:
        for rank, process in self._processes.items():
            status = process.poll()
            if status and self._first_failure is None:
                shown = 128 - status if status < 0 else status
                self._first_failure = RankFailed(rank, shown, self._log(rank))

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes.values() if process.poll() is None]

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.log"
