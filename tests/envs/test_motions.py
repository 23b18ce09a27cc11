"""Reference motions: layouts, resampling, forward kinematics and checks."""

import dataclasses
import math

import mujoco
import numpy as np
import pytest

from unilab_fabric.cli import main
from unilab_fabric.envs import motions
from unilab_fabric.envs.motions import Poses, angular_velocity, complete, load_motion, read_csv, resample
from unilab_fabric.envs.quaternions import multiply
from unilab_fabric.envs.robots import g1
from unilab_fabric.errors import UserError

STAND = np.array(g1.STAND_JOINTS)


@pytest.fixture(scope="module")
def model():
    return g1.load("faithful")


def poses(frames=31, fps=30.0):
    """The robot stands, leans to a side while it turns about the vertical with 1 rad/s, and swings its left arm."""
    time = np.arange(frames) / fps
    turn = np.stack([np.cos(time / 2), 0 * time, 0 * time, np.sin(time / 2)], 1)
    lean = np.tile([math.cos(0.1), math.sin(0.1), 0, 0], (frames, 1))
    joints = np.tile(STAND, (frames, 1))
    joints[:, g1.PARTS.index("left_shoulder_pitch")] += 0.5 * np.sin(2 * np.pi * time)
    root = np.stack([0.2 * time, 0 * time, np.full(frames, 0.80)], 1)
    return Poses(fps=fps, root_pos=root, root_quat=multiply(turn, lean), joint_pos=joints)


@pytest.fixture(scope="module")
def motion(model):
    return complete(resample(poses(), 50.0), model)


def test_resampling_keeps_length_and_goes_through_the_frames():
    fast = resample(poses(), 90.0)
    assert len(fast.root_pos) == 91
    for name in ("root_pos", "root_quat", "joint_pos"):
        np.testing.assert_allclose(getattr(fast, name)[::3], getattr(poses(), name), atol=1e-12)
    assert len(resample(poses(), 50.0).root_pos) == 51  # one second and its end
    np.testing.assert_allclose(np.linalg.norm(fast.root_quat, axis=1), 1.0)


def test_turns_take_the_shorter_arc():
    two = poses(2)
    flipped = dataclasses.replace(two, root_quat=two.root_quat * [[1], [-1]])
    np.testing.assert_allclose(
        np.abs((resample(flipped, 300.0).root_quat * resample(two, 300.0).root_quat).sum(1)), 1.0
    )


def test_the_angular_velocity_of_a_steady_turn_is_steady_and_in_the_world_frame():
    spin = angular_velocity(poses().root_quat, 30.0)
    np.testing.assert_allclose(spin, np.tile([0, 0, 1.0], (31, 1)), atol=1e-9)


def test_bodies_move_as_their_positions_and_turns_say(model, motion):
    """Velocities by forward kinematics against differences of positions; a wrong frame of the turn would show."""
    inside = slice(2, -2)
    by_difference = np.gradient(motion.body_pos_w, 1 / 50, axis=0)
    np.testing.assert_allclose(motion.body_lin_vel_w[inside], by_difference[inside], atol=0.02)
    hand = motion.body_names.index("left_wrist_yaw_link")
    for body in (0, hand):
        spin = angular_velocity(motion.body_quat_w[:, body], 50.0)
        np.testing.assert_allclose(motion.body_ang_vel_w[inside, body], spin[inside], atol=0.02)
    np.testing.assert_allclose(np.linalg.norm(motion.body_lin_vel_w[:, 0, :2], axis=1), 0.2, atol=1e-6)


def test_a_motion_survives_its_file(model, motion, tmp_path):
    motions.save_motion(motion, tmp_path / "a.npz")
    again = load_motion(tmp_path / "a.npz", model)
    assert (again.fps, again.frames, again.joint_names) == (50.0, 51, g1.JOINTS)
    for name in motions.ARRAYS:
        np.testing.assert_allclose(getattr(again, name), getattr(motion, name), atol=1e-5)


def arrays(motion):
    return {name: getattr(motion, name) for name in motions.ARRAYS}


@pytest.mark.parametrize("layout", ["world first", "without the world", "named and shuffled, root in front"])
def test_the_layouts_of_others_load(model, motion, tmp_path, layout):
    given, root = arrays(motion), np.zeros((motion.frames, 7))
    names = {}
    if layout == "world first":
        for name in motions.ARRAYS[2:]:
            given[name] = np.concatenate([np.zeros_like(given[name][:, :1]), given[name]], axis=1)
    if layout.startswith("named"):
        order = np.random.default_rng(0).permutation(29)
        bodies = np.random.default_rng(1).permutation(30)
        given["joint_pos"] = np.concatenate([root, given["joint_pos"][:, order]], axis=1)
        given["joint_vel"] = np.concatenate([root[:, :6], given["joint_vel"][:, order]], axis=1)
        for name in motions.ARRAYS[2:]:
            extra = np.full_like(given[name][:, :1], 7.0)
            given[name] = np.concatenate([extra, given[name][:, bodies]], axis=1)
        names["joint_names"] = np.array(g1.JOINTS)[order]
        names["body_names"] = np.array(["world", *np.array(motion.body_names)[bodies]])
    np.savez(tmp_path / "a.npz", fps=np.array([50]), **given, **names)
    again = load_motion(tmp_path / "a.npz", model)
    for name in motions.ARRAYS:
        np.testing.assert_array_equal(getattr(again, name), getattr(motion, name))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"fps": None, "body_quat_w": None}, "it has no fps, body_quat_w; allowed: the keys fps, joint_pos"),
        ({"joint_pos": np.zeros((51, 23))}, "its joint_pos has 23 columns; allowed: 29 or 36, or names in the file"),
        ({"body_pos_w": np.zeros((51, 14, 3))}, "its body_pos_w has 14 columns; allowed: 30 or 31"),
        ({"joint_vel": np.zeros((50, 29))}, "as many in each, two or more"),
        ({"joint_names": np.array(["a"] * 29)}, "its names lack left_hip_pitch_joint"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(model, motion, tmp_path, change, told):
    given = {"fps": np.array([50]), **arrays(motion), **change}
    np.savez(tmp_path / "a.npz", **{name: value for name, value in given.items() if value is not None})
    with pytest.raises(UserError, match=r"task\.motion is .*a\.npz; ") as refused:
        load_motion(tmp_path / "a.npz", model)
    assert told in str(refused.value)


def test_no_file_and_no_npz_are_refused(model, tmp_path):
    with pytest.raises(UserError, match="it cannot be read: No such file"):
        load_motion(tmp_path / "none.npz", model)
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(UserError, match="it is not an npz file of arrays"):
        load_motion(tmp_path / "text.npz", model)


# ---- CSV ------------------------------------------------------------------------------------------------------------


def plain_csv(path, source, header=""):
    rows = np.concatenate([source.root_pos, source.root_quat[:, [1, 2, 3, 0]], source.joint_pos], axis=1)
    path.write_text(header + "\n".join(",".join(f"{value:.9f}" for value in row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("header", ["", "x,y,z\n"])
def test_the_plain_layout_is_read_with_and_without_a_header(model, tmp_path, header):
    found = read_csv(plain_csv(tmp_path / "a.csv", poses(), header), model, 30.0)
    for name in ("root_pos", "root_quat", "joint_pos"):
        np.testing.assert_allclose(getattr(found, name), getattr(poses(), name), atol=1e-8)


def test_the_named_layout_is_in_centimetres_and_degrees_about_fixed_axes(model, tmp_path):
    names = [f"{joint}_dof" for joint in reversed(g1.JOINTS)]
    header = ["Frame", *(f"root_{kind}{axis}" for kind in ("translate", "rotate") for axis in "XYZ"), *names]
    row = [0, 10.0, 20.0, 80.0, 90.0, 0.0, 90.0, *np.degrees(STAND[::-1])]
    (tmp_path / "a.csv").write_text("\n".join(",".join(map(str, line)) for line in (header, row, row)))
    found = read_csv(tmp_path / "a.csv", model, 120.0)
    np.testing.assert_allclose(found.root_pos[0], [0.1, 0.2, 0.8])
    np.testing.assert_allclose(found.joint_pos[0], STAND, atol=1e-12)
    matrix = np.zeros(9)
    mujoco.mju_quat2Mat(matrix, found.root_quat[0])
    # first a quarter turn about x (y to z), then one about z (x to y)
    np.testing.assert_allclose(matrix.reshape(3, 3) @ [0, 1, 0], [0, 0, 1], atol=1e-9)
    np.testing.assert_allclose(matrix.reshape(3, 3) @ [1, 0, 0], [0, 1, 0], atol=1e-9)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda lines: [*lines[:3], lines[3] + ",1.0", *lines[4:]], "line 4 has 37 columns; allowed: 36"),
        (lambda lines: [*lines[:3], lines[3].replace("0.8", "x", 1), *lines[4:]], "line 4, column "),
        (lambda lines: lines[:1], "it has fewer than two frames"),
    ],
)
def test_a_csv_with_a_mistake_names_its_line(model, tmp_path, edit, told):
    path = plain_csv(tmp_path / "a.csv", poses())
    path.write_text("\n".join(edit(path.read_text().splitlines())))
    with pytest.raises(UserError) as refused:
        read_csv(path, model, 30.0)
    assert told in str(refused.value)


# ---- checks ---------------------------------------------------------------------------------------------------------


def test_a_sound_motion_has_no_problems(model, motion):
    assert motions.problems(motion, model) == []


def changed(motion, name, frame, column, value):
    array = getattr(motion, name).copy()
    array[frame, column] = value
    return dataclasses.replace(motion, **{name: array})


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        (lambda m: changed(m, "joint_vel", 7, 3, math.nan), "frame 7: joint_vel is not finite"),
        (
            lambda m: changed(m, "body_quat_w", 9, 2, 0.9),
            "frame 9: the quaternion of left_hip_roll_link has the length",
        ),
        (lambda m: changed(m, "joint_pos", 4, 3, 3.2), "frame 4: left_knee_joint is 3.200 rad; its range is -0.087 to"),
        (lambda m: changed(m, "joint_pos", 4, 0, 1.5), "frames 3 to 4: left_hip_pitch_joint jumps, 91 rad/s"),
        (lambda m: changed(m, "body_pos_w", 5, 0, 3.0), "frames 4 to 5: the root jumps"),
        (lambda m: changed(m, "body_pos_w", slice(None), (0, 2), 0.5), "under the floor"),
    ],
)
def test_each_mistake_is_told_with_its_place(model, motion, mistake, told):
    if told == "under the floor":
        array = motion.body_pos_w.copy()
        array[:, 0, 2] = 0.6
        wrong = dataclasses.replace(motion, body_pos_w=array)
    else:
        wrong = mistake(motion)
    found = motions.problems(wrong, model)
    assert any(told in line for line in found), found


def test_a_velocity_in_the_wrong_frame_is_found(model):
    """What a converter makes that writes a world-frame turn into the body-frame place of a free joint."""
    time = np.arange(51) / 50
    turn = np.stack([np.cos(time), 0 * time, 0 * time, np.sin(time)], 1)  # 2 rad/s about the vertical
    lying = np.tile([math.sqrt(0.5), math.sqrt(0.5), 0, 0], (51, 1))
    source = dataclasses.replace(poses(51, 50.0), root_quat=multiply(turn, lying))
    good = complete(source, model)
    bad = good.body_ang_vel_w.copy()
    bad[:, 0] = [0.0, -2.0, 0.0]
    wrong = dataclasses.replace(good, body_ang_vel_w=bad)
    assert any("as if a body-frame velocity" in line for line in motions.problems(wrong, model))
    assert not any("body-frame" in line for line in motions.problems(good, model))


# ---- the command ----------------------------------------------------------------------------------------------------


def test_convert_check_and_info(tmp_path, capsys):
    source = plain_csv(tmp_path / "a.csv", poses())
    assert main(["motion", "convert", f"--input={source}", f"--output={tmp_path / 'a.npz'}"]) == 0
    told = capsys.readouterr().out
    assert "51 frames at 50 a second, 1.00 s; 29 joints, 30 bodies" in told
    assert "a.npz: written" in told
    assert main(["motion", "check", f"--input={tmp_path / 'a.npz'}"]) == 0
    assert main(["motion", "info", f"--input={tmp_path / 'a.npz'}"]) == 0
    assert "left_shoulder_pitch_joint" in capsys.readouterr().out


def test_convert_tells_what_is_wrong_and_ends_with_2(tmp_path, capsys):
    low = dataclasses.replace(poses(), root_pos=poses().root_pos - [0, 0, 0.3])
    source = plain_csv(tmp_path / "a.csv", low)
    assert main(["motion", "convert", f"--input={source}", f"--output={tmp_path / 'a.npz'}"]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 20
    assert all(line.startswith(f"error: {source}: frame ") and line.endswith("under the floor") for line in told)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["convrt"], "motion is convrt; did you mean convert?"),
        (["convert", "--input=a.csv"], "output is missing; allowed: the npz file to write"),
        (["convert", "--input=a.csv", "--output=a.npz"], "input is a.csv; it cannot be read: No such file"),
        (["check", "--input=a.npz", "--input_fps=0"], "input_fps is 0.0; allowed: more than 0 frames a second"),
    ],
)
def test_bad_input_is_one_line(arguments, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["motion", *arguments]) == 2
    assert f"error: {told}" in capsys.readouterr().err
