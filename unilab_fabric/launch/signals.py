"""SIGINT and SIGTERM of a rank, seen at once also while its main thread is inside a collective.

CPython runs Python handlers in the main thread between bytecodes, so a thread blocked in C++ never runs them. The
wake-up descriptor is written by the C handler itself; a thread of ours reads it.
"""

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """The first signal asks the run to stop, or ends a process that has not begun to train; a second one ends it."""

    def __init__(self, on_end: Callable[[int], None], *, same_s: float) -> None:
        """Starts to listen; call it from the main thread. `on_end(number)` runs before the process is ended.

        Signals within `same_s` [s] of the first are taken for the same one: who ends a whole control group, as systemd
        and SLURM do, reaches a rank twice, directly and through its launcher.
        """
        self._on_end = on_end
        self._same_s = same_s
        self._asked_at: float | None = None
        self._on_stop: Callable[[int], None] | None = None
        self._lock = threading.Lock()
        reader, self._writer = socket.socketpair()  # kept: the descriptor closes with it
        self._writer.setblocking(False)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: None)  # with the default action there would be nothing to wake up for
        signal.set_wakeup_fd(self._writer.fileno())
        threading.Thread(target=self._listen, args=(reader,), name="signals", daemon=True).start()

    def stop_through(self, on_stop: Callable[[int], None]) -> None:
        """From now on the first signal calls `on_stop(number)` and the run comes to its end in good order."""
        with self._lock:
            self._on_stop = on_stop

    def _listen(self, reader: socket.socket) -> None:
        while number := reader.recv(1):
            if number[0] in STOP_SIGNALS:
                self._take(number[0])

    def _take(self, number: int) -> None:
        with self._lock:
            now = time.monotonic()
            if self._on_stop is not None and self._asked_at is None:
                self._asked_at = now
                self._on_stop(number)
            elif self._on_stop is None or now - (self._asked_at or now) >= self._same_s:
                self._on_end(number)
                sys.stderr.flush()
                os._exit(128 + number)  # the main thread may be blocked for ever
