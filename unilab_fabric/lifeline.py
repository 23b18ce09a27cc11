"""A child process that cannot outlive the one that started it."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def die_with_parent(parent_pid: int) -> None:
    """Ends this process once `parent_pid`, which started it, is gone; call it first thing in the child.

    Linux has the kernel do it, at once and even while the interpreter is busy. The signal follows the thread that
    started the child, so start children from a thread that lives as long as its process. Elsewhere a thread looks
    twice a second.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="lifeline", daemon=True).start()
    if os.getppid() != parent_pid:  # it died before the line above
        os._exit(1)


def _watch(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os._exit(1)
