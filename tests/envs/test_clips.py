"""The shipped clips: what a robot could do."""

import mujoco
import numpy as np
import pytest

from unilab_fabric.envs.clips import CLIPS, clip_path, make
from unilab_fabric.envs.motions import ARRAYS, load_motion, problems
from unilab_fabric.envs.robots import g1
from unilab_fabric.errors import UserError

ANKLES = [f"{side}_ankle_roll_link" for side in g1.SIDES]
SOLE = 0.035  # m, under the ankle's origin


@pytest.fixture(scope="module")
def model():
    return g1.load("faithful")


@pytest.fixture(scope="module", params=CLIPS)
def clip(request, model):
    return load_motion(clip_path(request.param), model)


def ankles(clip):
    """(T, 2, 3)"""
    return clip.body_pos_w[:, [clip.body_names.index(name) for name in ANKLES]]


def carries(clip):
    """(T, 2): whether a foot is on the floor."""
    return ankles(clip)[:, :, 2] < SOLE + 2e-3


def centre_of_mass(clip, model):
    """(T, 3)"""
    data = mujoco.MjData(model)
    found = []
    for frame in range(clip.frames):
        data.qpos[:] = np.concatenate([clip.body_pos_w[frame, 0], clip.body_quat_w[frame, 0], clip.joint_pos[frame]])
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        found.append(data.subtree_com[0].copy())
    return np.array(found)


def test_the_shipped_file_is_what_the_script_makes(clip):
    name = next(name for name in CLIPS if make.LENGTHS_S[name][0] == pytest.approx(clip.length_s))
    made = make.make(name)
    for array in ARRAYS:
        np.testing.assert_allclose(getattr(clip, array), getattr(made, array), atol=2e-4)
    assert clip_path(name).stat().st_size < 300_000
    assert 6 <= clip.length_s <= 10
    assert clip.fps == 50


def test_it_passes_all_checks_and_is_slow_enough_for_its_motors(clip, model):
    assert problems(clip, model) == []
    assert np.abs(clip.joint_vel).max() < 8.0  # rad/s
    assert np.abs(np.diff(clip.joint_vel, axis=0)).max() * clip.fps < 150.0  # rad/s^2


def test_feet_that_carry_do_not_slide_tilt_or_sink(clip):
    positions, on_floor = ankles(clip), carries(clip)
    assert on_floor.any(axis=1).all()  # it never flies
    for side in range(2):
        stance = on_floor[:-1, side] & on_floor[1:, side]
        step = np.linalg.norm(np.diff(positions[:, side, :2], axis=0), axis=1)[stance]
        assert step.max() < 5e-4
        assert step.sum() < 4e-3
    assert positions[:, :, 2].min() > SOLE - 3.5e-3
    quat = clip.body_quat_w[:, [clip.body_names.index(name) for name in ANKLES]]
    assert (1 - 2 * (quat[:, :, 1] ** 2 + quat[:, :, 2] ** 2)).min() > np.cos(np.radians(0.5))


def test_the_centre_of_mass_stays_over_the_feet_that_carry(clip, model):
    """Everything is slow, so the point under it must lie within the soles, or between two of them."""
    com, positions, on_floor = centre_of_mass(clip, model), ankles(clip), carries(clip)
    low = np.where(on_floor[:, :, None], positions[:, :, :2] + [-0.05, -0.03], np.inf).min(1)
    high = np.where(on_floor[:, :, None], positions[:, :, :2] + [0.12, 0.03], -np.inf).max(1)
    outside = np.maximum(low - com[:, :2], com[:, :2] - high).max(1)
    assert outside.max() < 0.0, (int(outside.argmax()), float(outside.max()))


def test_it_begins_and_ends_at_rest_near_the_stand_pose(clip):
    for frame in (0, -1):
        assert np.abs(clip.joint_pos[frame] - g1.STAND_JOINTS).max() < 0.12
        assert np.abs(clip.joint_vel[frame]).max() < 0.05


def test_something_happens_in_each(model):
    squat, wave = (load_motion(clip_path(name), model) for name in CLIPS)
    assert np.ptp(squat.body_pos_w[:, 0, 2]) > 0.12
    assert (ankles(squat)[-1, :, 0] - ankles(squat)[0, :, 0]).tolist() == pytest.approx([0.16, 0.16], abs=2e-3)
    assert not carries(squat).all()
    hand = wave.body_names.index("right_wrist_yaw_link")
    assert np.ptp(wave.body_pos_w[:, hand, 2]) > 0.25
    assert carries(wave).all()


def test_a_clip_goes_by_name_or_path(tmp_path):
    assert clip_path("wave_and_turn").is_file()
    (tmp_path / "a.npz").write_bytes(b"")
    assert clip_path(str(tmp_path / "a.npz")) == tmp_path / "a.npz"
    with pytest.raises(UserError, match=r"there is no such file; did you mean wave_and_turn"):
        clip_path("wave_and_trun")
