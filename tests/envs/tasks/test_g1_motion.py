"""G1MotionTracking against MuJoCo stepped plainly and formulas written out, one robot at a time."""

import copy
import dataclasses
import math

import mujoco
import numpy as np
import pytest

from tests.envs.tasks.test_g1_walk import site_velocity
from tests.envs.tasks.test_go2_joystick import by_tag, plain_robot
from unilab_fabric.envs import quaternions
from unilab_fabric.envs.clips import clip_path
from unilab_fabric.envs.motions import load_motion, save_motion
from unilab_fabric.envs.robots import g1
from unilab_fabric.envs.sampling import FrameSampler, Sampling
from unilab_fabric.envs.tasks.g1_motion import (
    ANCHOR,
    BODIES,
    G1MotionTracking,
    Thresholds,
    TrackingNoise,
    TrackingPushes,
    TrackingRandomization,
    TrackingRewards,
)
from unilab_fabric.errors import UserError

N = 5
STAND = np.array(g1.STAND_JOINTS)
WIDE = Thresholds(anchor_height=100.0, anchor_tilt=100.0, end_height=100.0)
"""Nothing fails."""


def make(num_envs=N, **settings):
    return G1MotionTracking(num_envs, **{"num_threads": 1, "seed": 4, **settings})


def play(task, steps, scale=0.1, seed=0):
    rng = np.random.default_rng(seed)
    action = np.zeros((task.num_envs, 29), np.float32)
    for _ in range(steps):
        action = (scale * rng.uniform(-1, 1, action.shape)).astype(np.float32)
        task.advance(action)
    return action


def matrix(quat):
    result = np.zeros(9)
    mujoco.mju_quat2Mat(result, np.asarray(quat, np.float64))
    return result.reshape(3, 3)


def six(turn):
    return turn[:, :2].ravel()


def bodies_before_the_last_substep(model, data, action):
    """Steps a robot and returns its bodies (position, turn, velocity, spin) as the last substep found them."""
    data.ctrl[:] = STAND + action * np.float32(2.0)
    for _ in range(3):
        mujoco.mj_step(model, data)  # leaves what was derived before it moved
    return bodies_of(model, data)


def bodies_of(model, data):
    found = []
    for name in BODIES:
        body, velocity = model.body(name).id, np.zeros(6)
        mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body, velocity, 0)
        found.append((data.xpos[body].copy(), data.xquat[body].copy(), velocity[3:].copy(), velocity[:3].copy()))
    return found


def test_sizes_and_metrics():
    spec = make().task_spec()
    assert (spec.actor_size, spec.critic_size, spec.action_size) == (160, 289, 29)
    names = {metric.name for metric in spec.metrics}
    assert {f"Episode/{name}" for name in dataclasses.asdict(TrackingRewards())} <= names
    assert {"Episode/anchor_error", "Episode/body_error", "Episode/joint_error", "Episode/sampling_entropy"} <= names


@pytest.mark.parametrize("after", [0, 6])
def test_observations_are_the_reference_and_the_robot_in_the_torso_s_frame(after):
    task = make(thresholds=WIDE)
    task.reset(seed=1)
    action = play(task, after)
    reference = task.reference
    for env in range(N):
        frame = task.frame[env]
        data = plain_robot(task, env)
        mujoco.mj_forward(task.sims.model, data)
        critic = task.observation["critic"][env]
        np.testing.assert_array_equal(task.observation["actor"][env], critic[:160])
        np.testing.assert_array_equal(critic[:58], np.r_[reference.joint_pos[frame], reference.joint_vel[frame]])
        here, turn = task.pos[env, ANCHOR], matrix(task.quat[env, ANCHOR])
        np.testing.assert_allclose(critic[58:61], turn.T @ (reference.pos[frame, ANCHOR] - here), atol=1e-5)
        np.testing.assert_allclose(critic[61:67], six(turn.T @ matrix(reference.quat[frame, ANCHOR])), atol=1e-5)
        np.testing.assert_allclose(critic[67:70], site_velocity(task.sims.model, data, "imu_in_pelvis")[1], atol=1e-4)
        np.testing.assert_allclose(critic[70:73], site_velocity(task.sims.model, data, "imu_in_torso")[0], atol=1e-4)
        np.testing.assert_allclose(critic[73:102], data.qpos[7:] - STAND, atol=1e-6)
        np.testing.assert_allclose(critic[102:131], data.qvel[6:], atol=1e-5)
        np.testing.assert_array_equal(critic[131:160], action[env])
        for k in range(len(BODIES)):
            where = turn.T @ (task.pos[env, k] - here)
            np.testing.assert_allclose(critic[160 + 3 * k :][:3], where, atol=1e-5)
            np.testing.assert_allclose(critic[202 + 6 * k :][:6], six(turn.T @ matrix(task.quat[env, k])), atol=1e-5)
        np.testing.assert_array_equal(critic[286:289], critic[67:70])


def test_bodies_are_mujoco_s_at_reset_and_one_substep_old_after_a_step():
    task = make(thresholds=WIDE)
    task.reset(seed=1)
    model = task.sims.model
    robots = [plain_robot(task, env) for env in range(N)]
    for env, data in enumerate(robots):
        mujoco.mj_forward(model, data)
        for k, (pos, quat, velocity, spin) in enumerate(bodies_of(model, data)):
            np.testing.assert_allclose(task.pos[env, k], pos, atol=1e-5)
            np.testing.assert_allclose(np.abs(np.dot(task.quat[env, k], quat)), 1.0, atol=1e-6)
            np.testing.assert_allclose(task.lin_vel[env, k], velocity, atol=1e-4)
            np.testing.assert_allclose(task.ang_vel[env, k], spin, atol=1e-4)
    robots = [plain_robot(task, env) for env in range(N)]
    action = play(task, 1, seed=7)
    for env, data in enumerate(robots):
        for k, (pos, _, velocity, spin) in enumerate(bodies_before_the_last_substep(model, data, action[env])):
            np.testing.assert_allclose(task.pos[env, k], pos, atol=1e-5)
            np.testing.assert_allclose(task.lin_vel[env, k], velocity, atol=1e-3)
            np.testing.assert_allclose(task.ang_vel[env, k], spin, atol=1e-3)


def test_reward_terms_are_those_of_the_formulas():
    task = make(thresholds=WIDE)
    task.reset(seed=2)
    play(task, 3)
    frame, target_pos, target_quat = task.frame.copy(), task.target_pos.copy(), task.target_quat.copy()
    before = task._action.copy()
    action = play(task, 1, seed=5)
    term = dict(zip(dataclasses.asdict(TrackingRewards()), task.terms, strict=True))
    reference = task.reference

    def turned(a, b):
        return math.acos(min(max((np.trace(matrix(a).T @ matrix(b)) - 1) / 2, -1), 1))

    for env in range(N):
        f, pos, quat = frame[env], task.pos[env], task.quat[env]
        limits = np.array([task.sims.model.joint(name).range for name in g1.JOINTS])
        joints = task.sims.qpos[env, 7:]
        beyond = np.maximum(limits[:, 0] - joints, 0) + np.maximum(joints - limits[:, 1], 0)
        expected = {
            "anchor_pos": math.exp(-((reference.pos[f, ANCHOR] - pos[ANCHOR]) ** 2).sum() / 0.09),
            "anchor_ori": math.exp(-(turned(reference.quat[f, ANCHOR], quat[ANCHOR]) ** 2) / 0.16),
            "body_pos": math.exp(-((target_pos[env] - pos) ** 2).sum(1).mean() / 0.09),
            "body_ori": math.exp(
                -np.mean([turned(a, b) ** 2 for a, b in zip(target_quat[env], quat, strict=True)]) / 0.16
            ),
            "body_lin_vel": math.exp(-((reference.lin_vel[f] - task.lin_vel[env]) ** 2).sum(1).mean()),
            "body_ang_vel": math.exp(-((reference.ang_vel[f] - task.ang_vel[env]) ** 2).sum(1).mean() / 3.14**2),
            "action_rate": ((action[env] - before[env]) ** 2).sum(),
            "joint_limit": (beyond**2).sum(),
            "low_bodies": sum(
                pos[k, 2] < 0.05 for k, name in enumerate(BODIES) if "ankle" not in name and "wrist" not in name
            ),
        }
        for name, value in expected.items():
            assert term[name][env] == pytest.approx(value, rel=2e-3, abs=1e-5), name


def test_targets_are_the_reference_moved_to_the_robot_and_turned_about_the_vertical():
    task = make()
    task.reset(seed=3)
    for env in range(N):
        frame, here = task.frame[env], task.pos[env, ANCHOR]
        off = matrix(task.quat[env, ANCHOR]) @ matrix(task.reference.quat[frame, ANCHOR]).T
        yaw = math.atan2(off[1, 0], off[0, 0])
        turn = np.array([[math.cos(yaw), -math.sin(yaw), 0], [math.sin(yaw), math.cos(yaw), 0], [0, 0, 1]])
        for k in range(len(BODIES)):
            there = task.reference.pos[frame, k]
            moved = turn @ (there - task.reference.pos[frame, ANCHOR]) + here
            np.testing.assert_allclose(task.target_pos[env, k], [moved[0], moved[1], there[2]], atol=1e-5)
            np.testing.assert_allclose(
                matrix(task.target_quat[env, k]), turn @ matrix(task.reference.quat[frame, k]), atol=1e-5
            )


def test_the_next_frame_is_shown_and_a_clip_s_end_is_a_time_limit():
    task = make(thresholds=WIDE, motion=("wave_and_turn", "squat_and_step"))
    task.reset()
    last = task.reference.last
    assert (last[0], last[-1]) == (400, 400 + 461)
    task.frame[:] = [10, 398, 399, 400, 861]
    task._aim(np.arange(N))
    action = np.zeros((N, 29), np.float32)
    task.advance(action)
    assert task.truncated.tolist() == [False, False, False, True, True]
    assert task.frame[:3].tolist() == [11, 399, 400]
    np.testing.assert_array_equal(task.next_observation["critic"][1, :29], task.reference.joint_pos[399])
    assert not task.terminated.any()
    task.advance(action)
    assert task.truncated[2]
    assert not task.terminated[2]


def test_a_robot_that_starts_in_the_reference_scores_high():
    task = make(400, sampling=Sampling(mode="mixed"))
    task.reset(seed=5)
    task.advance(((task.reference.joint_pos[task.frame] - STAND) / 2.0).astype(np.float32))
    term = dict(zip(dataclasses.asdict(TrackingRewards()), task.terms, strict=True))
    assert term["body_pos"].mean() > 0.9
    assert term["anchor_pos"].mean() > 0.85
    assert term["body_ori"].mean() > 0.8
    assert task.terminated.mean() < 0.02


@pytest.mark.parametrize(
    ("change", "fails"),
    [
        (lambda motion: None, False),
        (lambda motion: motion.__setitem__(2, motion[2] + 0.6), True),
        (lambda motion: motion.__setitem__(slice(0, 2), motion[0:2] + 5.0), False),  # drift over the floor
        (lambda motion: motion.__setitem__(slice(3, 7), [math.cos(0.7), math.sin(0.7), 0, 0]), True),
    ],
)
def test_heights_and_tilt_end_an_episode_and_drift_does_not(change, fails):
    task = make(1)
    task.reset(seed=1)
    task.frame[:] = 5
    motion = np.zeros(71)
    motion[:3], motion[3:7] = task.reference.pos[5, 0], task.reference.quat[5, 0]
    motion[7:36] = task.reference.joint_pos[5]
    change(motion)
    task.sims.place(np.array([0]), motion)
    task._derive(0, motion)
    task._aim(np.array([0]))
    task.advance(((task.reference.joint_pos[task.frame] - STAND) / 2.0).astype(np.float32))
    assert task.terminated[0] == fails


def sampler(*clips, **settings):
    """Of clips with so many frames."""
    last = np.repeat(np.cumsum(clips) - 1, clips)
    return FrameSampler(Sampling(**settings), last, g1.CONTROL_STEP_S)


def test_episodes_begin_more_often_where_they_fail():
    sampling = sampler(461)
    assert sampling.bins == 10
    np.testing.assert_allclose(sampling.probabilities(), 0.1)
    for _ in range(50):
        sampling.note(np.array([230, 231, 232]))  # in the middle: bin 5
    sampling.note(np.zeros(0, np.int64))
    expected = 3 * (1 - (1 - 0.001) ** 50)
    assert sampling.failures[5] == pytest.approx(expected)
    share = (expected + 0.01) / (expected + 0.1)
    assert sampling.probabilities()[5] == pytest.approx(share)
    drawn = sampling.draw(np.random.default_rng(0), 4000)
    assert drawn.min() >= 0
    assert drawn.max() < 460
    assert ((drawn >= 230) & (drawn < 276)).mean() == pytest.approx(share, abs=0.03)


def test_with_a_lookahead_they_also_begin_before_the_place_where_they_fail():
    sampling = sampler(461, lookahead=3, lookahead_decay=0.5)
    sampling.failures[:] = 0.0
    sampling.failures[[5, 9]] = 1.0
    weights = np.full(10, 0.01)
    weights[[5, 9]] += 1.0
    behind = np.concatenate([weights, [weights[9], weights[9]]])
    expected = behind[:10] + 0.5 * behind[1:11] + 0.25 * behind[2:12]
    np.testing.assert_allclose(sampling.probabilities(), expected / expected.sum())


def test_mixed_sampling_begins_at_the_start_of_any_clip_or_anywhere():
    drawn = sampler(100, 300, mode="mixed", start_ratio=0.4).draw(np.random.default_rng(0), 8000)
    assert drawn.max() == 399
    for start in (0, 100):
        assert (drawn == start).mean() == pytest.approx(0.2 + 0.6 / 400, abs=0.02)
    rest = drawn[(drawn != 0) & (drawn != 100)]
    assert (rest < 100).mean() == pytest.approx(0.25, abs=0.03)
    assert set(sampler(100, mode="mixed", start_ratio=1.0).draw(np.random.default_rng(0), 50)) == {0}


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: Sampling(mode="start"), "task.sampling.mode is start; allowed: adaptive or mixed"),
        (lambda: Sampling(start_ratio=1.5), "task.sampling.start_ratio is 1.5; allowed: 0 to 1"),
        (lambda: Sampling(lookahead=0), "task.sampling.lookahead is 0; allowed: 1 or more"),
        (lambda: Sampling(lookahead_decay=0.0), "task.sampling.lookahead_decay is 0.0; allowed: more than 0, up to 1"),
        (lambda: TrackingPushes(interval_s=0.0), "task.pushes.interval_s is 0.0; allowed: 0.02 s or more"),
        (lambda: TrackingPushes(tilting=-1.0), "task.pushes.tilting is -1.0; allowed: 0 or more"),
        (
            lambda: TrackingRandomization(torso_com=(0.1, -0.1, 0.0)),
            "task.randomization.torso_com is [0.1, -0.1, 0.0]; allowed: three numbers from 0 to less than 1 m",
        ),
        (
            lambda: TrackingRandomization(encoder_bias=(0.1, 0.0)),
            "task.randomization.encoder_bias is [0.1, 0.0]; allowed: two finite numbers, the smaller first",
        ),
        (
            lambda: TrackingRandomization(friction=(-0.1, 1.0)),
            "task.randomization.friction is [-0.1, 1.0]; allowed: 0 or more",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(make_it, said):
    with pytest.raises(UserError) as refused:
        make_it()
    assert str(refused.value) == said


def test_robots_differ_within_the_ranges_and_anew_at_every_reset():
    task = make(200, randomization=TrackingRandomization())
    task.reset()
    model, torso = task.sims.model, task.sims.model.body("torso_link").id
    shift = task.sims.mutable["physics/body_ipos"][:, torso] - model.body_ipos[torso]
    reach = np.array([0.025, 0.05, 0.05])
    assert (np.abs(shift) <= reach + 1e-9).all()
    assert (np.abs(shift).max(axis=0) > 0.9 * reach).all()
    others = np.arange(model.nbody) != torso
    assert (task.sims.mutable["physics/body_ipos"][:, others] == model.body_ipos[others]).all()
    friction = task.sims.mutable["physics/geom_friction"][:, [model.geom(name).id for name in g1.CORNERS], 0]
    assert (friction == friction[:, :1]).all()
    assert 0.3 <= friction.min() < 0.35
    assert 1.15 < friction.max() <= 1.2
    bias = task._robots.encoder_bias.copy()
    assert 0.0099 < np.abs(bias).max() <= 0.01
    task.reset()
    assert not (task._robots.encoder_bias == bias).any(axis=1).all()


def test_a_shifted_centre_of_mass_weighs_as_in_mujoco():
    task = make(3, randomization=TrackingRandomization(encoder_bias=None, friction=None), thresholds=WIDE)
    task.reset(seed=6)
    action = play(task, 1)
    torso, expected = task.sims.model.body("torso_link").id, []
    for env in range(3):
        model = copy.copy(task.sims.model)
        model.body_ipos[torso] = task.sims.mutable["physics/body_ipos"][env, torso]
        mujoco.mj_setConst(model, mujoco.MjData(model))
        data = mujoco.MjData(model)
        mujoco.mj_setState(model, data, task.sims.state[env], mujoco.mjtState.mjSTATE_INTEGRATION)
        data.ctrl[:] = STAND + 2.0 * action[env]
        mujoco.mj_step(model, data, nstep=3)
        expected.append(data.qpos.copy())
    task.advance(action)
    np.testing.assert_allclose(task.sims.qpos, expected, atol=1e-7)


def test_an_encoder_s_error_is_in_what_the_actor_sees_and_against_it_in_what_the_servo_gets():
    ranges = TrackingRandomization(torso_com=None, friction=None)
    task = make(randomization=ranges, thresholds=WIDE)
    task.reset()
    action = play(task, 2)
    bias = task._robots.encoder_bias
    assert np.abs(bias).min() > 0
    seen = task.observation["actor"] - task.observation["critic"][:, :160]
    np.testing.assert_allclose(seen[:, 73:102], bias, atol=1e-6)
    assert not np.delete(seen, np.s_[73:102], axis=1).any()
    np.testing.assert_allclose(task.observation["critic"][:, 73:102], task.sims.qpos[:, 7:] - STAND, atol=1e-6)
    np.testing.assert_allclose(task.sims.ctrl, STAND + 2.0 * action - bias, atol=1e-6)


def test_a_push_changes_the_velocity_in_the_world_by_no_more_than_its_reach():
    pushes = TrackingPushes(interval_s=0.02)
    task, still = make(300, pushes=pushes), make(300)
    for one in (task, still):
        one.reset(seed=1)
        one.sims.step = lambda: None
    np.testing.assert_array_equal(task.sims.qvel, still.sims.qvel)
    task._simulate(np.zeros((300, 29), np.float32))
    change = task.sims.qvel[:, :6] - still.sims.qvel[:, :6]
    spin = quaternions.rotate(task.sims.qpos[:, 3:7], change[:, 3:])
    for found, reach in ((change[:, :3], [0.5, 0.5, 0.2]), (spin, [0.52, 0.52, 0.78])):
        assert (np.abs(found) <= np.array(reach) + 1e-9).all()
        assert (np.abs(found).max(axis=0) > 0.9 * np.array(reach)).all()
    assert (task.sims.qvel[:, 6:] == still.sims.qvel[:, 6:]).all()


def test_pushes_come_as_often_as_their_interval_says():
    task = make(400, pushes=TrackingPushes(interval_s=0.5), thresholds=WIDE)
    task.reset()
    task.sims.step = lambda: None
    pushed = 0
    for _ in range(50):
        before = task.sims.qvel[:, :3].copy()
        task._simulate(np.zeros((400, 29), np.float32))
        pushed += (task.sims.qvel[:, :3] != before).any(axis=1).sum()
    assert pushed / 400 == pytest.approx(50 * 0.02 / 0.5, abs=0.3)


def test_random_robots_and_pushes_continue_bit_for_bit():
    settings = {"randomization": TrackingRandomization(), "pushes": TrackingPushes(interval_s=0.1)}
    task, other = make(20, **settings), make(20, **{**settings, "seed": 9})
    task.reset()
    play(task, 10, scale=0.5)
    other.reset()
    other.set_state(task.get_state())
    for one in (task, other):
        play(one, 30, scale=0.5, seed=2)
    for group in ("actor", "critic"):
        np.testing.assert_array_equal(other.observation[group], task.observation[group])
    np.testing.assert_array_equal(other.sims.qpos, task.sims.qpos)


def test_failures_are_noted_and_return_with_the_state():
    task = make(20)
    task.reset()
    play(task, 40, scale=1.0)
    assert by_tag(task)["Episode/falls"][0] > 0
    assert task.sampling.failures.sum() > 0
    other = make(20)
    other.reset()
    other.set_state(task.get_state())
    np.testing.assert_array_equal(other.sampling.failures, task.sampling.failures)
    for one in (task, other):
        play(one, 20, scale=1.0, seed=3)
    np.testing.assert_array_equal(other.observation["critic"], task.observation["critic"])
    np.testing.assert_array_equal(other.reward, task.reward)


def test_noise_is_on_what_the_actor_measures_alone():
    task = make(200, noise=TrackingNoise())
    task.reset()
    difference = task.observation["actor"] - task.observation["critic"][:, :160]
    widths = np.concatenate([[0.1] * 3, [0.2] * 3, [0.01] * 29, [1.5] * 29])
    assert (np.abs(difference[:, 67:131]) <= widths + 1e-5).all()
    assert (np.abs(difference[:, 67:131]).max(axis=0) > 0.8 * widths).all()
    assert not difference[:, :67].any()
    assert not difference[:, 131:].any()


def test_motions_that_do_not_fit_are_refused(tmp_path):
    motion = load_motion(clip_path("wave_and_turn"), g1.load("fast"))
    save_motion(dataclasses.replace(motion, fps=30.0), tmp_path / "slow.npz")
    with pytest.raises(UserError, match="it has 30 frames a second; allowed: 50, one in each control step"):
        make(motion=(str(tmp_path / "slow.npz"),))
    low = motion.body_pos_w - [0, 0, 0.2]
    save_motion(dataclasses.replace(motion, body_pos_w=low), tmp_path / "low.npz")
    with pytest.raises(UserError, match="under the floor; `motion check` tells all"):
        make(motion=(str(tmp_path / "low.npz"),))
    with pytest.raises(UserError, match="there is no such file"):
        make(motion=("dance",))
    with pytest.raises(UserError, match=r"task\.motion is empty"):
        make(motion=())


def test_quaternions_are_those_of_mujoco():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 50, 4))
    a, b = (q / np.linalg.norm(q, axis=1, keepdims=True) for q in (a, b))
    v = rng.standard_normal((50, 3))
    for i in range(50):
        product = np.zeros(4)
        mujoco.mju_mulQuat(product, a[i], b[i])
        np.testing.assert_allclose(quaternions.multiply(a, b)[i], product, atol=1e-12)
        np.testing.assert_allclose(quaternions.rotate(a, v)[i], matrix(a[i]) @ v[i], atol=1e-12)
        np.testing.assert_allclose(quaternions.two_columns(a)[i], six(matrix(a[i])), atol=1e-12)
        cosine = (np.trace(matrix(a[i]).T @ matrix(b[i])) - 1) / 2
        assert quaternions.angle(a, b)[i] == pytest.approx(math.acos(cosine), abs=1e-6)
