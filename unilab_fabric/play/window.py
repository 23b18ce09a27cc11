"""A policy in MuJoCo's own window."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from unilab_fabric.errors import UserError
from unilab_fabric.play.playing import Playing, draw_motion, follow

_END_S = 10.0
_OTHERS = "allowed: web, or --output FILE"


def show(playing: Playing, seconds: float | None = None) -> None:
    """Plays in real time until the window is closed, or for `seconds` [s].

    Raises UserError where no window can be opened, KeyboardInterrupt after Ctrl+C.
    """
    if sys.platform == "linux" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError("viewer", "window", f"there is no display here; {_OTHERS}")
    with _interrupted_later() as interrupted, _window(playing) as viewer:
        follow(viewer.cam, playing.simulation.model)
        until = math.inf if seconds is None else time.monotonic() + seconds
        while viewer.is_running() and not interrupted.is_set() and time.monotonic() < until:
            began = time.monotonic()
            with viewer.lock():
                playing.step()
                viewer.user_scn.ngeom = 0
                draw_motion(viewer.user_scn, playing)
            viewer.sync()
            time.sleep(max(0.0, playing.control_step_s - (time.monotonic() - began)))


@contextmanager
def _interrupted_later() -> Iterator[threading.Event]:
    """Keeps Ctrl+C until the block's end: raised while the viewer starts or ends, it crashes the interpreter.

    A second Ctrl+C is not kept.
    """
    interrupted = threading.Event()

    def note(number: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextmanager
def _window(playing: Playing) -> Iterator[Any]:
    """The viewer. Its threads have ended afterwards: if they outlive the interpreter, it crashes."""
    import mujoco.viewer

    _try_to_open()
    before = set(threading.enumerate())
    try:
        viewer = mujoco.viewer.launch_passive(
            playing.simulation.model, playing.data, show_left_ui=False, show_right_ui=False
        )
    except RuntimeError as error:  # macOS, without mjpython
        raise UserError("viewer", "window", f"{error}; {_OTHERS}") from None
    try:
        yield viewer
    finally:
        viewer.close()
        for thread in set(threading.enumerate()) - before:
            thread.join(_END_S)


def _try_to_open() -> None:
    """Raises UserError where GLFW finds no display that answers; the viewer's own thread would fail unseen."""
    import glfw

    with _quiet(glfw):
        opened = glfw.init()
        code, reason = glfw.get_error()
        glfw.terminate()
    if not opened:
        raise UserError("viewer", "window", f"no window can be opened ({reason or code}); {_OTHERS}")


@contextmanager
def _quiet(glfw: Any) -> Iterator[None]:
    reporting = glfw.ERROR_REPORTING
    glfw.ERROR_REPORTING = False
    try:
        yield
    finally:
        glfw.ERROR_REPORTING = reporting
