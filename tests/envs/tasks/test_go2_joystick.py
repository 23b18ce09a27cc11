"""Go2JoystickFlat against MuJoCo stepped plainly, one robot at a time."""

import math

import mujoco
import numpy as np
import pytest

from unilab_fabric.envs.commands import VelocityCommands
from unilab_fabric.envs.robots import go2
from unilab_fabric.envs.tasks.go2_joystick import (
    Go2JoystickFlat,
    Go2Noise,
    Go2Pushes,
    Go2Randomization,
    Go2Rewards,
)

N = 6
STAND = np.array(go2.STAND_JOINTS)


def make(num_envs=N, **settings):
    return Go2JoystickFlat(num_envs, **{"num_threads": 1, "seed": 4, **settings})


def play(task, steps, scale=1.0, seed=0):
    """Steps with random actions; returns the last ones, (N, 12)."""
    rng = np.random.default_rng(seed)
    action = np.zeros((task.num_envs, 12), np.float32)
    for _ in range(steps):
        action = (scale * rng.uniform(-1, 1, action.shape)).astype(np.float32)
        task.advance(action)
    return action


def by_tag(task):
    return {metric.name: tuple(total) for metric, total in zip(task.metrics, task.totals.tolist(), strict=True)}


def plain_robot(task, env):
    """MuJoCo's own data in the state of one environment, controls included."""
    data = mujoco.MjData(task.sims.model)
    mujoco.mj_setState(task.sims.model, data, task.sims.state[env], mujoco.mjtState.mjSTATE_INTEGRATION)
    return data


def velocity_b(model, data):
    """Angular and linear velocity at the inertial unit, in its own frame, as MuJoCo works them out."""
    mujoco.mj_forward(model, data)
    result = np.zeros(6)
    mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_SITE, model.site("imu").id, result, 1)
    return result[:3], result[3:]


def test_sizes_limits_and_time_step():
    task = make()
    spec = task.task_spec()
    assert (spec.actor_size, spec.critic_size, spec.action_size) == (49, 52, 12)
    assert (spec.action_low, spec.action_high) == ((-1,) * 12, (1,) * 12)
    task.reset()
    play(task, 5)
    np.testing.assert_allclose(task.sims.state[:, 0], 0.1)  # the physics' own clock after 5 steps of 0.02 s
    assert [metric.name for metric in spec.metrics if metric.kind == "mean"] == [
        "Train/mean_reward",
        "Train/mean_episode_length",
        "Episode/tracking_lin_vel",
        "Episode/tracking_ang_vel",
        "Episode/lin_vel_z",
        "Episode/ang_vel_xy",
        "Episode/base_height",
        "Episode/action_rate",
        "Episode/similar_to_default",
        "Episode/contact",
        "Episode/swing_feet_z",
        "Episode/planar_error",
        "Episode/yaw_error",
        "Episode/falls",
    ]


@pytest.mark.parametrize("after", [0, 7])  # at reset, and after steps
def test_observations_are_what_mujoco_says_of_the_state(after):
    task = make()
    task.reset()
    action = play(task, after)
    model = task.sims.model
    for env in range(N):
        data = plain_robot(task, env)
        spin, velocity = velocity_b(model, data)
        actor, critic = task.observation["actor"][env], task.observation["critic"][env]
        np.testing.assert_array_equal(actor, critic[:49])
        np.testing.assert_allclose(actor[0:3], spin, atol=1e-5)
        np.testing.assert_allclose(actor[3:6], data.body("base").xmat.reshape(3, 3).T @ [0, 0, -1], atol=1e-5)
        np.testing.assert_allclose(actor[6:18], data.qpos[7:] - STAND, atol=1e-6)
        np.testing.assert_allclose(actor[18:30], data.qvel[6:], atol=1e-5)
        np.testing.assert_array_equal(actor[30:42], action[env])
        np.testing.assert_allclose(critic[49:52], velocity, atol=1e-5)


@pytest.mark.parametrize("heading", [0.0, 1.2])
def test_gravity_does_not_turn_with_the_heading(heading):
    task = make(1)
    task.reset()
    motion = task.sims.motion[0].copy()
    yaw, pitch = [math.cos(heading / 2), 0, 0, math.sin(heading / 2)], [math.cos(0.15), 0, math.sin(0.15), 0]
    mujoco.mju_mulQuat(motion[3:7], np.array(yaw), np.array(pitch))
    motion[2], motion[19:] = 2.0, 0  # it falls freely and does not turn
    task.sims.place(np.array([0]), motion)
    task.advance(np.zeros((1, 12), np.float32))
    np.testing.assert_allclose(task.observation["actor"][0, 3:6], [math.sin(0.3), 0, -math.cos(0.3)], atol=2e-3)


@pytest.mark.parametrize("physics", ["fast", "faithful"])
def test_a_step_is_plain_mujoco_with_targets_around_the_stand_pose(physics):
    task = make(physics=physics, action_scale=0.4)
    task.reset()
    play(task, 3)
    robots = [plain_robot(task, env) for env in range(N)]
    action = play(task, 1, seed=9)
    for env, data in enumerate(robots):
        data.ctrl[:] = STAND + action[env] * np.float32(0.4)
        for _ in range({"fast": 2, "faithful": 4}[physics]):
            mujoco.mj_step(task.sims.model, data)
        np.testing.assert_array_equal(task.sims.qpos[env], data.qpos)
        np.testing.assert_array_equal(task.sims.qvel[env], data.qvel)


def test_each_action_moves_its_own_joint_in_joint_order():
    for joint in range(12):
        task = make(1)
        task.reset()
        action = np.zeros((1, 12), np.float32)
        action[0, joint] = 1.0
        moved = []
        for pushed in (action, np.zeros_like(action)):
            task.reset(seed=1)
            task.advance(pushed)
            moved.append(task.sims.qpos[0, 7:].copy())
        assert np.argmax(np.abs(moved[0] - moved[1])) == joint


WEIGHTS = {  # of the published training configuration, per second
    "tracking_lin_vel": 1.0,
    "tracking_ang_vel": 0.2,
    "lin_vel_z": -5.0,
    "ang_vel_xy": -0.1,
    "base_height": -100.0,
    "action_rate": -0.005,
    "similar_to_default": -0.1,
    "contact": 0.24,
    "swing_feet_z": 4.0,
}


def plain_terms(model, data, action, previous_action, command, phase, sigma):
    """The nine terms for one robot, in plain Python from MuJoCo's data after the step."""
    # What MuJoCo left behind of the last physics step: foot heights and contacts before it.
    height = [float(data.geom(leg).xpos[2]) for leg in go2.LEGS]
    ids = [model.geom(leg).id for leg in go2.LEGS]
    touching = {int(geom) for contact in data.contact for geom in contact.geom}
    touches = [foot in touching for foot in ids]
    spin, velocity = velocity_b(model, data)
    stance = [phase[i] < 0.6 for i in range(4)]
    return {
        "tracking_lin_vel": math.exp(-((command[0] - velocity[0]) ** 2 + (command[1] - velocity[1]) ** 2) / sigma),
        "tracking_ang_vel": math.exp(-((command[2] - spin[2]) ** 2) / sigma),
        "lin_vel_z": velocity[2] ** 2,
        "ang_vel_xy": spin[0] ** 2 + spin[1] ** 2,
        "base_height": (data.qpos[2] - 0.3) ** 2,
        "action_rate": sum((a - b) ** 2 for a, b in zip(action, previous_action, strict=True)),
        "similar_to_default": sum(abs(q - q0) for q, q0 in zip(data.qpos[7:], STAND, strict=True)),
        "contact": sum(t == s for t, s in zip(touches, stance, strict=True)) / 4,
        "swing_feet_z": sum(math.exp(-((z - 0.1) ** 2) / 0.01) for z, s in zip(height, stance, strict=True) if not s)
        / 4,
    }


@pytest.mark.parametrize("physics", ["fast", "faithful"])
def test_reward_terms_are_those_of_a_robot_stepped_alone(physics):
    task = make(physics=physics, tracking_sigma=0.4, reward_scale=3.0)
    task.reset()
    before = play(task, 12, scale=2.0)  # some feet are in the air
    robots = [plain_robot(task, env) for env in range(N)]
    action = play(task, 1, scale=2.0, seed=5)
    seen = []
    for env, data in enumerate(robots):
        data.ctrl[:] = task.sims.ctrl[env]
        for _ in range({"fast": 2, "faithful": 4}[physics]):
            mujoco.mj_step(task.sims.model, data)
        observed = task.next_observation["critic"][env]
        terms = plain_terms(task.sims.model, data, action[env], before[env], observed[42:45], observed[45:49], 0.4)
        np.testing.assert_allclose(task.terms[:, env], list(terms.values()), rtol=2e-4, atol=2e-5)
        weighted = sum(WEIGHTS[name] * value for name, value in terms.items())
        assert task.reward[env] == pytest.approx(0.02 * 3.0 * weighted, rel=1e-3, abs=1e-4)
        seen.append(terms["contact"])
        error = observed[42:45] - [observed[49], observed[50], observed[2]]
        np.testing.assert_allclose(task.figures[:, env], [math.hypot(*error[:2]), abs(error[2])], atol=1e-6)
    assert len(set(seen)) > 1


def test_weights_are_per_second_and_the_users():
    task = make(rewards=Go2Rewards(**{**dict.fromkeys(WEIGHTS, 0.0), "base_height": 2.0}), reward_scale=5.0)
    task.reset()
    play(task, 3)
    np.testing.assert_allclose(task.reward, 2.0 * (task.sims.qpos[:, 2] - 0.3) ** 2 * 0.02 * 5.0, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize(("degrees", "falls"), [(58, False), (62, True)])
@pytest.mark.parametrize("axis", [(1, 0, 0), (0, 1, 0), (-0.6, 0.8, 0)])
def test_a_tilt_beyond_60_degrees_is_a_fall_in_every_direction(degrees, falls, axis):
    task = make(1)
    task.reset()
    motion = task.sims.motion[0].copy()
    motion[2] = 2.0  # in free fall the tilt stays what it is
    motion[19:] = 0
    mujoco.mju_axisAngle2Quat(motion[3:7], np.array(axis, float), math.radians(degrees))
    task.sims.place(np.array([0]), motion)
    task.advance(np.zeros((1, 12), np.float32))
    assert task.terminated.tolist() == [falls]
    assert not task.truncated.any()


def test_the_time_limit_is_20_seconds_and_a_truncation():
    task = make(1)
    task.reset()
    for step in range(1000):
        assert not task.truncated.any(), step
        task.advance(np.zeros((1, 12), np.float32))
    assert task.truncated.all()
    assert not task.terminated.any()
    assert by_tag(task)["Train/mean_episode_length"] == (1000, 1)
    assert by_tag(task)["Episode/falls"] == (0, 1)


@pytest.mark.parametrize("physics", ["fast", "faithful"])
def test_left_alone_it_stands(physics):
    task = make(20, physics=physics)
    task.reset()
    for _ in range(250):
        task.advance(np.zeros((20, 12), np.float32))
        assert not task.terminated.any()
    assert (task.sims.qpos[:, 2] > 0.28).all()
    assert (task.observation["actor"][:, 5] < -0.99).all()
    assert by_tag(task)["Env/physics_diverged"] == (0, 0)


def test_episodes_begin_standing_anywhere_any_way_round_with_no_foot_in_the_floor():
    task = make(300)
    task.reset()
    motion = task.sims.motion.copy()
    assert (np.abs(motion[:, :2]).max(axis=0) <= 0.5).all()
    assert (np.abs(motion[:, :2]).max(axis=0) > 0.48).all()
    assert (np.abs(motion[:, 19:25]).max(axis=0) <= 0.5).all()
    assert (np.abs(motion[:, 19:25]).max(axis=0) > 0.48).all()
    assert not motion[:, 25:].any()
    assert (motion[:, 7:19] == STAND).all()
    yaw = 2 * np.arctan2(motion[:, 6], motion[:, 3])
    assert np.histogram((yaw + np.pi) % (2 * np.pi), bins=6)[0].min() > 25
    for env in range(20):
        data = plain_robot(task, env)
        mujoco.mj_forward(task.sims.model, data)
        feet = [data.geom(leg).xpos[2] for leg in go2.LEGS]
        np.testing.assert_allclose(feet, go2.FOOT_RADIUS, atol=1e-6)


def test_commands_are_uniform_over_their_ranges_and_kept_for_the_episode():
    task = make(500, episode_s=0.06)
    first = task.reset()[0]["actor"][:, 42:45]
    for column, (low, high) in enumerate([(-0.6, 1.0), (-0.4, 0.4), (-0.8, 0.8)]):
        assert low <= first[:, column].min() < low + 0.03
        assert high - 0.03 < first[:, column].max() <= high
        assert first[:, column].mean() == pytest.approx((low + high) / 2, abs=0.08)
    play(task, 2)
    np.testing.assert_array_equal(task.observation["actor"][:, 42:45], first)
    play(task, 1)  # the episode ends
    np.testing.assert_array_equal(task.next_observation["actor"][:, 42:45], first)
    assert (task.observation["actor"][:, 42:45] != first).all()


def test_command_ranges_are_the_users():
    task = make(commands=VelocityCommands(forward=(0.5, 0.5), left=(0, 0), turn=(-0.1, 0.1)))
    command = task.reset()[0]["critic"][:, 42:45]
    assert (command[:, :2] == [0.5, 0]).all()
    assert (np.abs(command[:, 2]) <= 0.1).all()


def test_the_trot_clock_turns_at_two_cycles_a_second_with_diagonal_feet_together():
    task = make(random_phase=False)
    assert task.reset()[0]["actor"][:, 45:49].tolist() == [[0, 0.5, 0.5, 0]] * N
    play(task, 5)
    np.testing.assert_allclose(task.observation["actor"][:, 45:49], [[0.2, 0.7, 0.7, 0.2]] * N, atol=1e-6)
    play(task, 20)
    np.testing.assert_allclose(task.observation["actor"][:, 45:49], [[0.0, 0.5, 0.5, 0.0]] * N, atol=1e-5)


def test_the_trot_clock_starts_anywhere_unless_told():
    phase = make(400).reset()[0]["actor"][:, 45]
    assert 0 <= phase.min() < 0.02 < 0.98 < phase.max() < 1
    assert phase.mean() == pytest.approx(0.5, abs=0.06)


def test_noise_is_on_what_the_actor_measures_and_the_critic_sees_none():
    noise = Go2Noise(angular_velocity=0.2, gravity=0.05, joint_position=0.01, joint_velocity=1.5)
    task = make(400, noise=noise)
    task.reset()
    widths = np.repeat([0.2, 0.05, 0.01, 1.5], [3, 3, 12, 12])
    play(task, 2)
    for group in (task.observation, task.next_observation):
        deviation = group["actor"] - group["critic"][:, :49]
        assert (np.abs(deviation[:, :30]) <= widths * 1.001 + 1e-6).all()
        assert (np.abs(deviation[:, :30]).max(axis=0) > 0.95 * widths).all()
        assert not deviation[:, 30:].any()
    quiet = make(400)
    quiet.reset()
    play(quiet, 1)
    np.testing.assert_array_equal(quiet.observation["actor"], quiet.observation["critic"][:, :49])


def test_pushes_change_the_velocity_of_the_pushed_alone():
    task, calm = make(300, pushes=Go2Pushes(interval_s=0.2)), make(300)
    task.reset(seed=2)
    calm.reset(seed=2)
    play(task, 1, scale=0)
    play(calm, 1, scale=0)
    moved = np.abs(task.sims.qvel[:, :3] - calm.sims.qvel[:, :3]).max(axis=1) > 1e-9
    assert 10 < moved.sum() < 60  # a tenth of them, 0.02 s / 0.2 s


def test_robots_differ_in_the_given_ranges_and_are_drawn_anew_at_reset():
    ranges = Go2Randomization(friction=(0.5, 0.9))
    task = make(60, randomization=ranges, episode_s=0.04)
    task.reset()

    def fields():
        state = task.get_state()
        feet = [task.sims.model.geom(leg).id for leg in go2.LEGS]
        base = task.sims.model.body("base").id
        return {
            "kp": state["physics/actuator_gainprm"][:, :, 0],
            "-kp": state["physics/actuator_biasprm"][:, :, 1],
            "kd": -state["physics/actuator_biasprm"][:, :, 2],
            "mass": state["physics/body_mass"][:, base],
            "com": state["physics/body_ipos"][:, base, 0],
            "friction": state["physics/geom_friction"][:, feet, 0],
        }

    first = fields()
    nominal = task.sims.model.body("base")
    for name, low, high in [
        ("kp", 31.5, 38.5),
        ("kd", 0.45, 0.55),
        ("mass", nominal.mass[0] - 1.5, nominal.mass[0] + 1.5),
        ("com", nominal.ipos[0] - 0.05, nominal.ipos[0] + 0.05),
        ("friction", 0.5, 0.9),
    ]:
        width = high - low
        assert low <= first[name].min() < low + 0.1 * width, name
        assert high - 0.1 * width < first[name].max() <= high, name
    np.testing.assert_array_equal(first["kp"], -first["-kp"])
    assert (first["friction"] == first["friction"][:, :1]).all()
    play(task, 1)
    np.testing.assert_array_equal(fields()["mass"], first["mass"])
    play(task, 1)  # the episode ends
    assert all((fields()[name] != first[name]).all() for name in first)


def test_a_randomised_robot_moves_as_mujoco_says_of_its_model():
    task = make(3, randomization=Go2Randomization())
    task.reset()
    play(task, 2)
    state = task.get_state()
    robots = [plain_robot(task, env) for env in range(3)]
    action = play(task, 1, seed=3)
    for env, data in enumerate(robots):
        model = go2.load("fast")
        for field in ("actuator_gainprm", "actuator_biasprm", "body_mass", "body_ipos", "geom_friction"):
            getattr(model, field)[:] = state[f"physics/{field}"][env]
        mujoco.mj_setConst(model, mujoco.MjData(model))
        data.ctrl[:] = STAND + action[env] * np.float32(0.25)
        for _ in range(2):
            mujoco.mj_step(model, data)
        np.testing.assert_allclose(task.sims.qpos[env], data.qpos, atol=1e-12)


EVERYTHING = {
    "noise": Go2Noise(),
    "pushes": Go2Pushes(interval_s=0.2),
    "randomization": Go2Randomization(),
    "episode_s": 0.3,
    "stagger": True,
}


@pytest.mark.parametrize("settings", [{}, EVERYTHING, {"physics": "faithful"}], ids=["plain", "everything", "faithful"])
def test_state_continues_bit_for_bit(settings):
    straight, resumed = make(**settings), make(**{**settings, "seed": 99})
    straight.reset()
    play(straight, 17)
    resumed.set_state(straight.get_state())
    for step in range(25):
        for task in (straight, resumed):
            play(task, 1, seed=step)
        for group in ("actor", "critic"):
            np.testing.assert_array_equal(resumed.observation[group], straight.observation[group])
            np.testing.assert_array_equal(resumed.next_observation[group], straight.next_observation[group])
        np.testing.assert_array_equal(resumed.reward, straight.reward)
        np.testing.assert_array_equal(resumed.totals, straight.totals)


def test_the_number_of_threads_changes_no_bit():
    one, three = make(), make(num_threads=3)
    for task in (one, three):
        task.reset()
        play(task, 30)
    np.testing.assert_array_equal(one.observation["critic"], three.observation["critic"])


@pytest.mark.parametrize("column", [2, 4, 10, 20, 30])  # height, quaternion, joint angle, base velocity, joint rate
def test_a_broken_state_ends_that_environment_alone_and_training_goes_on(column):
    task, unharmed = make(9), make(9)
    for either in (task, unharmed):
        either.reset()
        play(either, 5)
    task.sims.motion[7, column] = float("nan")
    for either in (task, unharmed):
        play(either, 1, seed=1)
    assert np.flatnonzero(task.terminated).tolist() == [7]
    assert task.reward[7] == 0
    assert by_tag(task)["Env/physics_diverged"] == (1, 1)
    others = np.arange(9) != 7
    np.testing.assert_array_equal(task.observation["critic"][others], unharmed.observation["critic"][others])
    for _ in range(20):
        play(task, 1)
        assert all(np.isfinite(rows).all() for rows in (*task.observation.values(), *task.next_observation.values()))
        assert np.isfinite(task.reward).all()
    assert by_tag(task)["Env/physics_diverged"] == (1, 1)


def mirror(mirrored, rows):
    """The mirror images of vectors in rows (n, k)."""
    return rows[:, mirrored.index] * np.array(mirrored.sign, rows.dtype)


# Of qpos and qvel side by side: y, the turns about x and z, and the legs change sides.
LEG_SWAP = [3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8]
LEG_SIGN = [-1, 1, 1] * 4
MOTION_INDEX = [0, 1, 2, 3, 4, 5, 6, *(7 + np.array(LEG_SWAP)), *range(19, 25), *(25 + np.array(LEG_SWAP))]
MOTION_SIGN = np.array([1, -1, 1, 1, -1, 1, -1, *LEG_SIGN, 1, -1, 1, -1, 1, -1, *LEG_SIGN])


@pytest.mark.parametrize("group", ["actor", "critic", "action"])
def test_the_mirror_image_of_a_mirror_image_is_the_thing_itself(group):
    one = Go2JoystickFlat.mirrors[group]
    size = {"actor": 49, "critic": 52, "action": 12}[group]
    rows = np.arange(1.0, size + 1)[None]
    assert sorted(one.index) == list(range(size))
    assert set(one.sign) == {-1, 1}
    np.testing.assert_array_equal(mirror(one, mirror(one, rows)), rows)
    assert (mirror(one, rows) != rows).any()


def test_in_the_mirror_left_and_right_legs_change_places():
    places = [f"{leg}_{part}" for leg in go2.LEGS for part in ("hip", "thigh", "calf")]
    swapped = [{"L": "R", "R": "L"}[name[1]].join([name[0], name[2:]]) for name in places]
    assert [places[i] for i in Go2JoystickFlat.mirrors["action"].index] == swapped
    phases = Go2JoystickFlat.mirrors["actor"].index[45:49]
    assert [go2.LEGS[i - 45] for i in phases] == ["FR", "FL", "RR", "RL"]


def test_actor_and_critic_are_mirrored_alike():
    actor, critic = Go2JoystickFlat.mirrors["actor"], Go2JoystickFlat.mirrors["critic"]
    assert critic.index[:49] == actor.index
    assert critic.sign[:49] == actor.sign


def test_a_mirrored_robot_under_mirrored_actions_moves_and_earns_alike():
    """Up to the little the robot itself is lopsided: its base's axes of inertia are 0.1 degrees off."""
    task, image = make(30), make(30)
    task.reset()
    play(task, 8, scale=2.0)
    mirrors = Go2JoystickFlat.mirrors
    state = task.get_state()
    start = mujoco.mj_stateSize(task.sims.model, mujoco.mjtState.mjSTATE_TIME)
    motion = state["physics/state"][:, start : start + 37]
    motion[:] = motion[:, MOTION_INDEX] * MOTION_SIGN
    state["now"] = mirror(mirrors["critic"], state["now"].T).T
    state["observation/actor"] = mirror(mirrors["actor"], state["observation/actor"])
    state["observation/critic"] = mirror(mirrors["critic"], state["observation/critic"])
    image.set_state(state)
    action = np.random.default_rng(2).uniform(-1, 1, (30, 12)).astype(np.float32)
    task.advance(action)
    image.advance(mirror(mirrors["action"], action))
    for group in ("actor", "critic"):
        expected = mirror(mirrors[group], task.next_observation[group])
        np.testing.assert_allclose(image.next_observation[group], expected, atol=2e-2)
    np.testing.assert_allclose(image.terms, task.terms, rtol=1e-2, atol=2e-3)
    np.testing.assert_allclose(image.reward, task.reward, rtol=1e-2, atol=2e-3)
    assert image.terms.std() > 0.1
