import mujoco
import numpy as np
import pytest

from unilab_fabric.envs.tasks.cartpole import CartpoleSwingup, balance, pole_up


def make(num_envs=4, **settings):
    task = CartpoleSwingup(num_envs, num_threads=1, **settings)
    task.reset(seed=0)
    return task


def place(task, cart, angle, cart_rate=0.0, pole_rate=0.0):
    task.sims.place(np.arange(task.num_envs), np.array([cart, angle, cart_rate, pole_rate]))


def still(task):
    task.advance(np.zeros((task.num_envs, 1), np.float32))


def test_the_pole_hangs_at_the_start_and_the_observation_says_so():
    position, velocity, sine, cosine, rate = make(200).observation["actor"].T
    assert (cosine < -0.95).all()
    assert (np.abs(sine) < 0.3).all()
    assert sine.min() < -0.25 < 0.25 < sine.max()
    assert np.abs(position).max() <= 0.3
    assert max(np.abs(velocity).max(), np.abs(rate).max()) <= 0.05


def test_observation_and_physics_are_plain_mujoco():
    task = make(3)
    robots = []
    for env in range(3):
        data = mujoco.MjData(task.sims.model)
        data.qpos[:], data.qvel[:] = task.sims.qpos[env], task.sims.qvel[env]
        robots.append(data)
    action = np.array([[-1.0], [0.25], [1.0]], np.float32)
    task.advance(action)
    for env, data in enumerate(robots):
        data.ctrl[:] = action[env]
        for _ in range(4):
            mujoco.mj_step(task.sims.model, data)
        assert data.time == pytest.approx(0.04)
        (x, angle), (v, rate) = data.qpos, data.qvel
        np.testing.assert_allclose(
            task.next_observation["actor"][env], [x, v, np.sin(angle), np.cos(angle), rate], rtol=1e-6
        )


def test_pole_up_and_balance_are_one_at_the_top_and_in_the_middle():
    assert pole_up(np.array([1.0, 0.0, -1.0])).tolist() == [1, 0.5, 0]
    zero, one = np.zeros(1), np.ones(1)
    assert balance(one, zero, zero).tolist() == [1]
    for worse in (balance(one * 0.9, zero, zero), balance(one, one, zero), balance(one, zero, one)):
        assert 0 < worse[0] < 1


def test_standing_up_earns_a_fifth_a_step_and_hanging_nothing():
    """A fifth, so that the return discounted at 0.98 fits critics on [0, 10]."""
    task = make(1)
    place(task, 0.0, 0.0)
    still(task)
    assert task.reward[0] == pytest.approx(0.2, abs=1e-3)
    assert task.figures[0, 0] == 1
    place(task, 0.0, np.pi)
    still(task)
    assert task.reward[0] == pytest.approx(0, abs=1e-3)
    assert task.figures[0, 0] == 0


def test_rewards_stay_within_zero_and_a_fifth():
    task = make(50)
    rng = np.random.default_rng(0)
    for _ in range(100):
        task.advance(rng.choice([-1.0, 1.0], (50, 1)).astype(np.float32))
        assert (task.reward >= 0).all()
        assert (task.reward <= 0.2 + 1e-6).all()


def test_the_cart_stays_on_its_rail():
    task = make(1)
    for _ in range(60):
        task.advance(np.ones((1, 1), np.float32))
    assert 1.5 < task.sims.qpos[0, 0] < 2.0


def test_episodes_end_by_time_alone():
    task = make(2, episode_s=1.0)
    for _ in range(24):
        still(task)
        assert not (task.terminated | task.truncated).any()
    still(task)
    assert task.truncated.all()
    assert not task.terminated.any()


def test_after_a_fault_an_environment_is_not_terminated_again():
    task = make(2)
    task.sims.motion[0, 0] = np.nan
    still(task)
    assert task.terminated.tolist() == [True, False]
    still(task)
    assert not task.terminated.any()


def test_state_continues_bit_for_bit():
    straight, resumed = make(6, episode_s=0.4), make(6, episode_s=0.4)
    action = np.linspace(-1, 1, 6, dtype=np.float32)[:, None]
    for _ in range(7):
        straight.advance(action)
    resumed.set_state(straight.get_state())
    for _ in range(25):
        straight.advance(action)
        resumed.advance(action)
        np.testing.assert_array_equal(resumed.observation["actor"], straight.observation["actor"])
        np.testing.assert_array_equal(resumed.reward, straight.reward)
