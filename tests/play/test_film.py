"""Films and pictures of a policy, without a display."""

import imageio.v3 as imageio
import mujoco
import numpy as np
import pytest

from tests.test_exporting import checkpoint
from unilab_fabric.cli import main
from unilab_fabric.envs.registry import make_task
from unilab_fabric.errors import UserError
from unilab_fabric.play import film
from unilab_fabric.play.playing import Playing, simulation_of


@pytest.fixture(scope="module")
def walks(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("play") / "run", "FastSAC")


@pytest.fixture(scope="module")
def graphics():
    try:
        mujoco.Renderer(mujoco.MjModel.from_xml_string("<mujoco/>"), 64, 64).close()
    except Exception as error:
        pytest.skip(f"nothing can be drawn here: {error}")


def playing(path, **changed):
    return Playing(path, **{"physics": "fast", "seed": 1, "episode_s": 5.0, **changed})


@pytest.mark.usefixtures("graphics")
def test_a_film_has_its_frames_and_the_robot_moves_in_it(walks, tmp_path):
    frames = film.record(playing(walks), tmp_path / "a.gif", seconds=0.4, width=160, height=120)
    images = imageio.imread(tmp_path / "a.gif", index=None)
    assert frames == len(images) == 10
    assert images.shape[1:] == (120, 160, 3)
    assert np.abs(images[-1].astype(int) - images[0]).mean() > 0.5
    assert images[0].std() > 10


@pytest.mark.usefixtures("graphics")
@pytest.mark.parametrize("name", ["a.mp4", "a.png"])
def test_the_command_writes_a_film_or_a_picture(walks, tmp_path, name, capsys):
    arguments = [f"--ckpt_path={walks}", f"--output={tmp_path / name}", "--seconds=0.2", "--width=160", "--height=128"]
    assert main(["play", *arguments]) == 0
    assert (tmp_path / name).stat().st_size > 500
    count = "1 frame of" if name == "a.png" else "5 frames of"
    assert f"{count} FastSAC on Go2JoystickFlat, 96 steps" in capsys.readouterr().out


@pytest.mark.usefixtures("graphics")
def test_arrows_show_command_and_velocity(walks):
    def last(planar):
        shown = playing(walks)
        shown.task.planar_motion = lambda: planar
        *_, frame = film.render(shown, seconds=0.1, width=160, height=120)
        return frame.astype(int)

    with_arrows = last((np.array([1.0, 0.0]), np.array([0.0, 1.0])))
    without = last((np.zeros(2), np.zeros(2)))
    changed = np.abs(with_arrows - without).max(axis=2)[40:] > 60  # below the caption
    assert changed.sum() > 30


def test_time_goes_on_over_the_end_of_an_episode(walks):
    shown = playing(walks, episode_s=0.1)
    for _ in range(12):
        shown.step()
    assert shown.control_step_s == pytest.approx(0.02)
    assert shown.task.episode_length[0] == 2


def test_no_graphics_is_one_line(walks, monkeypatch, tmp_path, capsys):
    def refused(*_):
        raise RuntimeError("no library\nand more")

    monkeypatch.setattr(mujoco, "Renderer", refused)
    monkeypatch.setenv("MUJOCO_GL", "egl")
    assert main(["play", f"--ckpt_path={walks}", f"--output={tmp_path / 'a.gif'}"]) == 2
    told = capsys.readouterr().err
    assert told == "error: MUJOCO_GL is egl; nothing can be drawn (no library); allowed: egl or osmesa, with that " + (
        "library installed\n"
    )


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seconds=0"], "seconds is 0.0; allowed: more than 0, in a film at most 600"),
        (["--width=101"], "width is 101; allowed: even numbers from 64 to 4096"),
        (["--output=a.avi"], "output is a.avi; allowed: a name that ends in .mp4, .gif or .png"),
        (["--output=nowhere/a.gif"], "output is nowhere/a.gif; allowed: a file in a folder that is there"),
    ],
)
def test_bad_input_is_one_line(arguments, told, capsys):
    assert main(["play", "--ckpt_path=last", *arguments]) == 2
    assert f"error: {told}" in capsys.readouterr().err


def test_missing_packages_are_one_line(walks, monkeypatch, tmp_path):
    monkeypatch.setattr(film, "find_spec", lambda package: None)
    with pytest.raises(UserError, match=r"pip install 'unilab-fabric\[video\]'"):
        film.record(playing(walks), tmp_path / "a.gif", seconds=0.1, width=64, height=64)


def test_an_environment_of_others_cannot_be_played():
    task = make_task("gymnasium:Pendulum-v1", {"num_envs": 1}, seed=0, num_threads=1)
    with pytest.raises(UserError, match="it is not one of our own simulations"):
        simulation_of(task)
