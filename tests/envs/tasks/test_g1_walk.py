"""G1WalkFlat against MuJoCo stepped plainly, one robot at a time."""

import dataclasses
import math

import mujoco
import numpy as np
import pytest

from tests.envs.tasks.test_go2_joystick import by_tag, plain_robot
from unilab_fabric.envs.commands import VelocityCommands
from unilab_fabric.envs.robots import g1
from unilab_fabric.envs.tasks.g1_walk import (
    POSE_WEIGHTS,
    SCALES,
    G1Noise,
    G1Randomization,
    G1Rewards,
    G1WalkFlat,
    PenaltyCurriculum,
    moved,
    swing_height,
    touching,
)
from unilab_fabric.errors import UserError

N = 6
STAND = np.array(g1.STAND_JOINTS)


def make(num_envs=N, **settings):
    return G1WalkFlat(num_envs, **{"num_threads": 1, "seed": 4, **settings})


def play(task, steps, scale=0.3, seed=0):
    rng = np.random.default_rng(seed)
    action = np.zeros((task.num_envs, 29), np.float32)
    for _ in range(steps):
        action = (scale * rng.uniform(-1, 1, action.shape)).astype(np.float32)
        task.advance(action)
    return action


def site_velocity(model, data, name):
    """Angular and linear velocity at a site, in its own frame, as MuJoCo works them out."""
    result = np.zeros(6)
    mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_SITE, model.site(name).id, result, 1)
    return result[:3], result[3:]


def test_sizes_limits_and_metrics():
    spec = make().task_spec()
    assert (spec.actor_size, spec.critic_size, spec.action_size) == (98, 101, 29)
    assert (spec.action_low, spec.action_high) == ((-1,) * 29, (1,) * 29)
    names = {metric.name for metric in spec.metrics}
    assert {f"Episode/{name}" for name in dataclasses.asdict(G1Rewards())} <= names
    assert {"Episode/planar_error", "Episode/yaw_error", "Episode/penalty_scale", "Episode/falls"} <= names


@pytest.mark.parametrize("after", [0, 7])  # at reset, and after steps
def test_observations_are_what_mujoco_says_of_the_state(after):
    task = make(episode_s=100)
    task.reset()
    action = play(task, after)
    model = task.sims.model
    for env in range(N):
        data = plain_robot(task, env)
        mujoco.mj_forward(model, data)
        actor, critic = task.observation["actor"][env], task.observation["critic"][env]
        np.testing.assert_array_equal(actor, critic[:98])
        np.testing.assert_allclose(actor[0:3] / 0.25, site_velocity(model, data, "imu_in_torso")[0], atol=1e-4)
        np.testing.assert_allclose(actor[3:6], data.body("torso_link").xmat.reshape(3, 3).T @ [0, 0, -1], atol=1e-5)
        np.testing.assert_allclose(actor[6:35], data.qpos[7:] - STAND, atol=1e-6)
        np.testing.assert_allclose(actor[35:64] / 0.05, data.qvel[6:], atol=1e-4)
        np.testing.assert_array_equal(actor[64:93], action[env])
        np.testing.assert_allclose(critic[98:101] / 2, site_velocity(model, data, "imu_in_pelvis")[1], atol=1e-4)


def test_without_scales_observations_are_in_plain_units():
    scaled, plain = make(), make(scaled=False)
    for task in (scaled, plain):
        task.reset(seed=2)
        play(task, 3)
    np.testing.assert_allclose(plain.observation["critic"] * SCALES, scaled.observation["critic"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("physics", ["fast", "faithful"])
def test_a_step_is_plain_mujoco_with_targets_around_the_stand_pose(physics):
    task = make(physics=physics, action_scale=0.5)
    task.reset()
    play(task, 3)
    robots = [plain_robot(task, env) for env in range(N)]
    action = play(task, 1, seed=9)
    for env, data in enumerate(robots):
        data.ctrl[:] = STAND + action[env] * np.float32(0.5)
        for _ in range(3):
            mujoco.mj_step(task.sims.model, data)
        np.testing.assert_array_equal(task.sims.qpos[env], data.qpos)


def test_reward_terms_are_those_of_the_formulas():
    """Recomputed from the state one by one, in float64; feet as before the last physics step."""
    task = make(curriculum=None, episode_s=100)
    task.reset()
    play(task, 4)
    before = task.observation["actor"][:, 64:93].copy()
    robots = [plain_robot(task, env) for env in range(N)]
    action = play(task, 1, seed=5)
    model = task.sims.model
    term = dict(zip(dataclasses.asdict(G1Rewards()), task.terms, strict=True))
    for env, data in enumerate(robots):
        data.ctrl[:] = STAND + action[env]
        for _ in range(3):
            mujoco.mj_step(model, data)
        feet = [data.sensor(f"{side}_foot_pos").data[2] for side in g1.SIDES]
        turns = [data.sensor(f"{side}_foot_quat").data.copy() for side in g1.SIDES]
        mujoco.mj_forward(model, data)
        spin, _ = site_velocity(model, data, "imu_in_torso")
        _, velocity = site_velocity(model, data, "imu_in_pelvis")
        up = data.body("torso_link").xmat.reshape(3, 3)[:, 2]
        command, phase = task.observation["actor"][env, 93:96], task.observation["actor"][env, 96:98]
        offset = data.qpos[7:] - STAND
        expected = {
            "tracking_lin_vel": math.exp(-((command[:2] - velocity[:2]) ** 2).sum() / 0.25),
            "tracking_ang_vel": math.exp(-((command[2] - spin[2]) ** 2) / 0.25),
            "alive": 1.0,
            "feet_phase": math.exp(-((np.array(feet) - swing_height(phase)) ** 2).sum() / 0.04),
            "ang_vel_xy": spin[0] ** 2 + spin[1] ** 2,
            "orientation": up[0] ** 2 + up[1] ** 2,
            "action_rate": ((action[env] - before[env]) ** 2).sum(),
            "pose": (POSE_WEIGHTS[:, 0] * offset**2).sum(),
            "feet_ori": sum(turn[1] ** 2 + turn[2] ** 2 for turn in turns),
            "lin_vel_z": velocity[2] ** 2,
            "base_height": (data.qpos[2] - 0.754) ** 2,
        }
        for name, value in expected.items():
            assert term[name][env] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_pose_weights_count_waist_and_arms_most():
    weights = dict(zip(g1.PARTS, POSE_WEIGHTS[:, 0].tolist(), strict=True))
    assert weights["left_hip_pitch"] == weights["right_knee"] == pytest.approx(0.01)
    assert (weights["right_hip_roll"], weights["left_hip_yaw"], weights["right_ankle_roll"]) == (1, 5, 5)
    assert {weights[part] for part in g1.PARTS if "waist" in part or part.partition("_")[2] in ("elbow",)} == {50}
    assert weights["left_shoulder_roll"] == weights["right_wrist_yaw"] == 50


def test_a_foot_is_highest_in_the_middle_of_its_swing():
    phase = np.array([0.0, math.pi, math.pi / 2, 3 * math.pi / 2, 2 * math.pi - 1e-6])
    np.testing.assert_allclose(swing_height(phase), [0.09, 0.0, 0.045, 0.045, 0.09], atol=1e-6)


def test_the_feet_s_phases_are_half_a_cycle_apart_and_advance_with_the_clock():
    task = make()
    task.reset()
    first = task.observation["actor"][:, 96:98].copy()
    np.testing.assert_allclose(np.mod(first[:, 1] - first[:, 0], 2 * math.pi), math.pi, atol=1e-5)
    play(task, 10)
    np.testing.assert_allclose(
        np.mod(task.observation["actor"][:, 96] - first[:, 0], 2 * math.pi), 2 * math.pi * 1.5 * 0.2, atol=1e-4
    )
    assert (task.observation["actor"][:, 96:98] >= 0).all()
    assert (task.observation["actor"][:, 96:98] < 2 * math.pi).all()


def test_a_small_planar_command_is_none_and_the_turn_stays():
    task = make(400, commands=VelocityCommands(forward=(-0.3, 0.3), left=(-0.3, 0.3)))
    task.reset()
    command = task.observation["actor"][:, 93:96]
    speed = np.hypot(command[:, 0], command[:, 1])
    assert ((speed == 0) | (speed > 0.2)).all()
    assert 0.2 < (speed == 0).mean() < 0.5
    assert (command[:, 2] != 0).all()


def test_a_corner_touches_from_its_radius_on():
    level = np.zeros((2, 4, 1), np.float32)
    level[:, 0] = 1.0
    site = 0.005 + 0.03 - 0.037  # the site is 2 mm below the sole, whose corners' centres are 5 mm above it
    heights = np.array([[site - 1e-4], [site + 1e-4]])
    assert touching(heights, level).ravel().tolist() == [True, False]
    toes_down = level.copy()
    toes_down[:, 0], toes_down[:, 2] = math.cos(0.1), math.sin(0.1)
    assert touching(heights, toes_down).ravel().tolist() == [True, True]
    assert touching(np.array([[0.05], [0.005]]), toes_down).ravel().tolist() == [False, True]


def test_air_time_counts_steps_of_the_right_length_while_there_is_a_command():
    task = make(2, commands=VelocityCommands(forward=(0.9, 0.9), left=(0.0, 0.0), turn=(0.0, 0.0)))
    task.reset()
    out, touches = np.zeros(2, np.float32), np.zeros((2, 2), np.bool_)
    seen = []
    for _ in range(30):
        task._count_air_time(touches, out=out)
        seen.append(out[0])
    assert seen[:2] == [0, 0]  # 0.02 and 0.04 s
    assert seen[2:24] == [2] * 22  # 0.06 to 0.48 s, both feet
    assert seen[-3:] == [0, 0, 0]
    task._now.command[:] = 0
    task._count_air_time(~touches, out=out)
    task._count_air_time(touches, out=out)
    assert not task._air_time[:, 0].any() or out[0] == 0


def test_a_fall_is_a_tilt_or_a_low_pelvis():
    for tilt, least, falls in [(70.0, 0.3, True), (55.0, 0.3, False), (0.0, 1.0, False), (0.0, 1.3, True)]:
        task = make(1, curriculum=None, min_height=least)
        task.reset()
        motion = task.sims.motion[0].copy()
        motion[2], motion[36:] = 1.2, 0
        half = math.radians(tilt) / 2
        motion[3:7] = [math.cos(half), math.sin(half), 0, 0]
        task.sims.place(np.array([0]), motion)
        task.advance(np.zeros((1, 29), np.float32))
        assert task.terminated[0] == falls, (tilt, least)


def test_penalties_grow_with_the_length_of_episodes():
    curriculum = PenaltyCurriculum()
    start = np.array([0.0625, 0.0])
    same = moved(start, curriculum, np.array([100]), 2048)
    np.testing.assert_allclose(same, [0.0625, 100 / 500])  # below: it would fall, and is at its least
    np.testing.assert_allclose(moved(np.array([0.1, 800.0]), curriculum, np.array([800]), 2048), [0.1001, 800.0])
    np.testing.assert_allclose(moved(np.array([0.1, 400.0]), curriculum, np.array([400]), 2048), [0.1, 400.0])
    np.testing.assert_allclose(moved(np.array([0.125, 900.0]), curriculum, np.full(600, 900), 2048), [0.125, 900.0])
    progress = np.array([0.0625, 1000.0])
    for _ in range(694):
        progress = moved(progress, curriculum, np.array([1000]), 4096)
    assert progress[0] == pytest.approx(0.125, rel=1e-3)


def test_the_curriculum_scales_negative_weights_alone_and_goes_with_the_state():
    plain, scaled = make(curriculum=None, episode_s=100), make(episode_s=100)
    for task in (plain, scaled):
        task.reset(seed=3)
        play(task, 5)
    for name, weight, one, other in zip(
        dataclasses.asdict(G1Rewards()),
        dataclasses.asdict(G1Rewards()).values(),
        plain.terms,
        scaled.terms,
        strict=True,
    ):
        np.testing.assert_allclose(other, one * (0.0625 if weight < 0 else 1.0), rtol=1e-6, err_msg=name)
    scaled._progress[:] = 0.1, 500.0
    other = make(episode_s=100)
    other.reset()
    other.set_state(scaled.get_state())
    assert other._progress.tolist() == [0.1, 500.0]


def test_mirror_images_are_what_a_mirrored_robot_would_see():
    """A robot and its mirror image, stepped with mirrored actions, keep mirrored observations."""
    task = make(2, episode_s=100, physics="fast")
    task.reset()
    mirror = {name: (list(m.index), np.array(m.sign)) for name, m in task.mirrors.items()}

    def image(name, row):
        index, sign = mirror[name]
        return row[index] * sign

    motion = task.sims.motion[0].copy()
    motion[:2], motion[3:7], motion[36:42] = 0, [1, 0, 0, 0], [0.3, 0.2, 0.1, 0.3, 0.2, 0.4]
    joints, sign = mirror["action"]
    motion[7:36] += 0.05 * np.sin(np.arange(29))
    other = motion.copy()
    other[7:36] = motion[7:36][joints] * sign
    other[36:42] *= [1, -1, 1, -1, 1, -1]
    task.sims.place(np.array([0, 1]), np.stack([motion, other]))
    task._now.command[:, 0], task._now.command[:, 1] = [0.5, 0.2, 0.3], [0.5, -0.2, -0.3]
    task._now.phase[:, 0], task._now.phase[:, 1] = [1.0, 1.0 + math.pi], [1.0 + math.pi, 1.0]
    task._now.action[:] = 0
    action = 0.2 * np.cos(np.arange(29)).astype(np.float32)
    for _ in range(5):
        task.advance(np.stack([action, action[joints] * sign]).astype(np.float32))
    critic = task.observation["critic"]
    np.testing.assert_allclose(image("critic", critic[0]), critic[1], atol=2e-2)
    np.testing.assert_allclose(image("actor", task.observation["actor"][0]), task.observation["actor"][1], atol=2e-2)


def test_noise_is_on_what_the_actor_measures_alone():
    task = make(200, noise=G1Noise())
    task.reset()
    difference = task.observation["actor"] - task.observation["critic"][:, :98]
    widths = np.concatenate([[0.2 * 0.25] * 3, [0.05] * 3, [0.01] * 29, [1.5 * 0.05] * 29])
    assert (np.abs(difference[:, :64]) <= widths + 1e-6).all()
    assert (np.abs(difference[:, :64]).max(axis=0) > 0.8 * widths).all()
    assert not difference[:, 64:].any()


def test_gains_differ_between_robots_and_return_with_the_state():
    task = make(randomization=G1Randomization())
    task.reset()
    gain, bias = task.sims.per_simulation("actuator_gainprm"), task.sims.per_simulation("actuator_biasprm")
    share = gain[:, :, 0] / task.sims.model.actuator_gainprm[:, 0]
    assert share.min() >= 0.9
    assert share.max() <= 1.1
    assert len(np.unique(share)) == N * 29
    np.testing.assert_array_equal(bias[:, :, 1], -gain[:, :, 0])
    assert (bias[:, :, 2] < 0).all()


def test_episodes_end_by_time_and_by_falls_and_are_reported():
    task = make(episode_s=0.2)
    task.reset()
    play(task, 60, scale=1.0)
    totals = by_tag(task)
    assert totals["Train/mean_episode_length"][1] >= N
    assert 0 <= totals["Episode/falls"][0] <= totals["Episode/falls"][1]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"foot_sigma": 0.0}, "task.foot_sigma is 0.0; allowed: more than 0"),
        ({"max_tilt": -1.0}, "task.max_tilt is -1.0; allowed: more than 0"),
        ({"physics": "real"}, "task.physics is real; allowed: fast, faithful"),
    ],
)
def test_settings_that_cannot_work(settings, told):
    with pytest.raises(UserError) as refused:
        make(**settings)
    assert str(refused.value) == told


def test_a_curriculum_that_shrinks_is_refused():
    with pytest.raises(UserError, match=r"task\.curriculum\.low is 0\.5; allowed: 0 to task\.curriculum\.high = 0\.1"):
        PenaltyCurriculum(low=0.5, high=0.1)
