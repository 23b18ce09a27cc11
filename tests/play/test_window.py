"""MuJoCo's own window, on a display without a screen."""

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageGrab

from tests.test_exporting import checkpoint
from unilab_fabric.cli import main

DEADLINE_S = 90


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("window") / "run", "FastSAC")


@pytest.fixture
def display():
    """A display of its own, as the value of DISPLAY."""
    if shutil.which("Xvfb") is None:
        pytest.skip("no Xvfb on this machine")
    read, write = os.pipe()
    command = ["Xvfb", "-displayfd", str(write), "-screen", "0", "800x600x24", "-nolisten", "tcp"]
    server = subprocess.Popen(command, pass_fds=[write], stderr=subprocess.DEVNULL)
    os.close(write)
    try:
        assert select.select([read], [], [], DEADLINE_S)[0], "Xvfb said no number"
        yield f":{os.read(read, 16).decode().strip()}"
    finally:
        os.close(read)
        server.terminate()
        server.wait(DEADLINE_S)


def pictures(display):
    """What the display shows, once something does."""
    end = time.monotonic() + DEADLINE_S
    while True:
        shown = np.asarray(ImageGrab.grab(xdisplay=display)).astype(int)
        if shown.any():
            yield shown
        assert time.monotonic() < end, "nothing was drawn"
        time.sleep(0.5)


def test_the_window_shows_the_robot_and_ctrl_c_ends_it(walks, display):
    surroundings = {key: value for key, value in os.environ.items() if key not in ("MUJOCO_GL", "WAYLAND_DISPLAY")}
    command = [sys.executable, "-m", "unilab_fabric", "play", f"--ckpt_path={walks}", "--viewer"]
    process = subprocess.Popen(
        command,
        env=surroundings | {"DISPLAY": display, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        drawn = pictures(display)
        first = next(drawn)
        changed = 0
        while changed < 200:
            changed = (np.abs(next(drawn) - first).max(axis=2) > 30).sum()
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=DEADLINE_S)
    finally:
        process.kill()
        process.wait()
    assert (process.returncode, said) == (130, "")


def test_a_window_needs_a_display(walks, monkeypatch, capsys):
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["play", f"--ckpt_path={walks}", "--viewer"]) == 2
    assert "viewer is window; there is no display here; allowed: web, or --output FILE" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="displays of X11")
def test_a_display_that_does_not_answer_is_one_line(walks, monkeypatch, capsys):
    monkeypatch.setenv("DISPLAY", ":4097")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    assert main(["play", f"--ckpt_path={walks}", "--viewer=window"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: viewer is window; no window can be opened (")
    assert told.count("\n") == 1
