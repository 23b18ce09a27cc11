"""The page in a real browser: what it shows, and that it moves."""

import io
import shutil
import socket
import threading
import time

import imageio.v3 as imageio
import numpy as np
import pytest
import torch

from tests.test_exporting import checkpoint
from unilab_fabric.cli import main
from unilab_fabric.play.playing import Playing
from unilab_fabric.play.web import WebView

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("web") / "run", "FastSAC")


@pytest.fixture
def view(walks):
    view = WebView(Playing(walks, physics="fast", seed=1, episode_s=20.0), host="127.0.0.1", port=0)
    yield view
    view.close()


def test_every_primitive_of_the_robot_is_where_mujoco_has_it(view):
    data = view._playing.data
    for _ in range(5):
        view._playing.step()
    view.update()
    assert len(view._geoms) == view._playing.simulation.model.ngeom - 1  # all but the floor
    for geom, handle in view._geoms.items():
        np.testing.assert_allclose(handle.position, data.geom_xpos[geom] - [*data.qpos[:2], 0], atol=1e-6)


def test_a_capsule_is_centred_and_as_long_as_in_mujoco(view):
    import mujoco

    mesh = view._mesh(mujoco.mjtGeom.mjGEOM_CAPSULE, np.array([0.05, 0.2, 0.0]))
    np.testing.assert_allclose(mesh.bounds, [[-0.05, -0.05, -0.25], [0.05, 0.05, 0.25]], atol=2e-3)


@pytest.mark.skipif(CHROMIUM is None, reason="no browser")
def test_a_browser_shows_the_robot_and_it_moves(view):
    playwright = pytest.importorskip("playwright.sync_api")
    view._playing.policy = lambda observation: torch.rand(1, 12) * 2 - 1  # it moves all the time
    running = threading.Thread(target=view.run, daemon=True)
    running.start()
    arguments = ["--no-sandbox", "--use-angle=swiftshader", "--enable-unsafe-swiftshader"]
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page(viewport={"width": 480, "height": 360})
        page.goto(view.url)
        page.get_by_text("FastSAC on Go2JoystickFlat").wait_for(timeout=60_000)
        end = time.monotonic() + 60
        first = dark(page)
        while first.mean() < 0.02:
            assert time.monotonic() < end, "the robot does not appear"
            first = dark(page)
        while (dark(page) != first).mean() < 0.002:
            assert time.monotonic() < end, "the robot does not move"
        browser.close()
    view.close()
    running.join(timeout=30)
    assert not running.is_alive()


def dark(page):
    """Which pixels of the page are as dark as the robot; under the caption nothing else is."""
    page.wait_for_timeout(500)
    return imageio.imread(io.BytesIO(page.screenshot()))[130:, :, :3].max(axis=2) < 115


def test_a_port_that_is_taken_is_one_line(walks, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["play", f"--ckpt_path={walks}", "--viewer=web", f"--port={port}", "--seconds=0.2"]) == 2
    assert f"error: port is {port}; it is taken; allowed: a free one" in capsys.readouterr().err


def test_the_command_serves_for_as_long_as_it_is_told(walks, capsys):
    assert main(["play", f"--ckpt_path={walks}", "--viewer=web", "--port=0", "--seconds=0.3"]) == 0
    assert "FastSAC on Go2JoystickFlat, 96 steps, for 0.3 s" in capsys.readouterr().out
