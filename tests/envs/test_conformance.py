"""Every task, ours or adapted, against what Gymnasium says of a vector environment with same-step autoreset."""

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from gymnasium.wrappers.vector import DictInfoToList

import unilab_fabric.envs  # noqa: F401  registers the tasks
from unilab_fabric.envs.registry import make_task
from unilab_fabric.envs.tasks.go2_joystick import Go2Noise, Go2Pushes, Go2Randomization
from unilab_fabric.envs.terrain import Terrain

N = 5


def go2(**settings):
    return gymnasium.make_vec("unilab_fabric/Go2JoystickFlat-v0", num_envs=N, num_threads=1, **settings)


MAKE = {
    "go2": lambda: go2(episode_s=0.2),
    "go2 as on the robot": lambda: go2(
        episode_s=0.2, noise=Go2Noise(), pushes=Go2Pushes(interval_s=0.1), randomization=Go2Randomization()
    ),
    "go2 on terrain": lambda: go2(episode_s=0.2, terrain=Terrain(), pushes=Go2Pushes(interval_s=0.1)),
    "g1 on terrain": lambda: gymnasium.make_vec(
        "unilab_fabric/G1WalkFlat-v0", num_envs=N, num_threads=1, episode_s=0.2, terrain=Terrain()
    ),
    "g1": lambda: gymnasium.make_vec("unilab_fabric/G1WalkFlat-v0", num_envs=N, num_threads=1, episode_s=0.2),
    "g1 motion": lambda: gymnasium.make_vec(
        "unilab_fabric/G1MotionTracking-v0", num_envs=N, num_threads=1, episode_s=0.2
    ),
    "cartpole": lambda: gymnasium.make_vec(
        "unilab_fabric/CartpoleSwingup-v0", num_envs=N, num_threads=1, episode_s=0.4
    ),
    "pendulum": lambda: make_task(
        "gymnasium:Pendulum-v1", {"num_envs": N, "env_kwargs": {"max_episode_steps": 10}}, seed=0, num_threads=1
    ),
    "tracking with differing robots": lambda: make_task(
        "G1MotionTracking",
        {"num_envs": N, "episode_s": 0.2, "pushes": {}, "randomization": {}, "noise": {}},
        seed=0,
        num_threads=1,
    ),
    "counting": lambda: make_task(
        "tests.offpolicy.counting.CountingEnv", {"num_envs": N, "episode_length": 6}, seed=0, num_threads=1
    ),
}
STEPS = 25  # enough for two ends of every episode


@pytest.fixture(params=list(MAKE))
def env(request):
    env = MAKE[request.param]()
    yield env
    env.close()


def play(env, steps=STEPS, seed=3):
    """Reset and steps with random actions: the first observation and what each step returned."""
    first, infos = env.reset(seed=seed)
    env.action_space.seed(seed)
    return first, infos, [env.step(env.action_space.sample()) for _ in range(steps)]


def flat(observation):
    return np.concatenate([observation["actor"], observation["critic"]], axis=1)


def test_metadata_and_batched_spaces(env):
    assert env.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP
    assert env.num_envs == N
    assert env.observation_space == batch_space(env.single_observation_space, N)
    assert env.action_space == batch_space(env.single_action_space, N)


def test_what_is_returned_lies_in_the_spaces_and_has_the_stated_types(env):
    first, infos, steps = play(env)
    assert infos == {}
    assert first in env.observation_space
    for observation, reward, terminated, truncated, infos in steps:
        assert observation in env.observation_space
        assert (reward.shape, reward.dtype) == ((N,), np.float32)
        assert (terminated.shape, terminated.dtype) == ((N,), np.bool_)
        assert (truncated.shape, truncated.dtype) == ((N,), np.bool_)
        assert not (terminated & truncated).any()
        assert all(np.isfinite(rows).all() for rows in observation.values())
        assert isinstance(infos, dict)


def test_a_seed_repeats_everything(env):
    once, _, steps = play(env)
    again, _, same_steps = play(env)
    np.testing.assert_array_equal(flat(once), flat(again))
    for one, other in zip(steps, same_steps, strict=True):
        np.testing.assert_array_equal(flat(one[0]), flat(other[0]))
        for i in (1, 2, 3):
            np.testing.assert_array_equal(one[i], other[i])


def test_reset_without_a_seed_goes_on_from_the_seed_before(env):
    def thrice():
        env.reset(seed=11)
        return [flat(env.reset()[0]) for _ in range(2)]

    for one, other in zip(thrice(), thrice(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_final_observation_comes_with_the_end_and_the_next_episode_in_the_same_step(env):
    first, _, steps = play(env)
    ended = np.zeros(N, int)
    before = first
    for observation, _, terminated, truncated, infos in steps:
        done = terminated | truncated
        if not done.any():
            assert "final_obs" not in infos
            assert "episode" not in infos
        else:
            assert infos["_final_obs"].tolist() == infos["_episode"].tolist() == done.tolist()
            assert infos["final_obs"].dtype == object
            for i in range(N):
                if not done[i]:
                    assert infos["final_obs"][i] is None
                    continue
                assert infos["final_obs"][i] in env.single_observation_space
                final, start = infos["final_obs"][i]["critic"], observation["critic"][i]
                assert not np.array_equal(final, start)
                assert not np.array_equal(final, before["critic"][i])
        ended += done
        before = observation
    assert (ended >= 2).all()


def test_episode_figures_sum_up_what_the_steps_returned(env):
    _, _, steps = play(env)
    returned, length = np.zeros(N), np.zeros(N, int)
    for _, reward, terminated, truncated, infos in steps:
        returned += reward
        length += 1
        done = terminated | truncated
        if done.any():
            np.testing.assert_allclose(infos["episode"]["r"][done], returned[done], rtol=1e-5, atol=1e-5)
            assert infos["episode"]["l"][done].tolist() == length[done].tolist()
            assert (infos["episode"]["r"][~done] == 0).all()
        returned[done], length[done] = 0, 0


def test_arrays_that_were_returned_are_not_written_to_again(env):
    _, _, steps = play(env, steps=12)
    copies = [([rows.copy() for rows in step[0].values()], *(a.copy() for a in step[1:4])) for step in steps]
    for _ in range(12):
        env.step(env.action_space.sample())
    for step, (observation, *rest) in zip(steps, copies, strict=True):
        for rows, copy in zip(step[0].values(), observation, strict=True):
            np.testing.assert_array_equal(rows, copy)
        for array, copy in zip(step[1:4], rest, strict=True):
            np.testing.assert_array_equal(array, copy)


def test_writing_into_what_was_returned_changes_nothing(env):
    _, _, untouched = play(env)
    observation, _ = env.reset(seed=3)
    env.action_space.seed(3)
    for expected in untouched:
        for rows in observation.values():
            rows[:] = 1e6
        observation, reward, _, _, infos = env.step(env.action_space.sample())
        np.testing.assert_array_equal(flat(observation), flat(expected[0]))
        np.testing.assert_array_equal(reward, expected[1])
        reward[:] = 1e6
        for values in infos.get("episode", {}).values():
            values[:] = 1


def test_infos_pass_through_gymnasiums_own_converter(env):
    wrapped = DictInfoToList(env)
    wrapped.reset(seed=3)
    seen = 0
    for _ in range(STEPS):
        infos = wrapped.step(wrapped.action_space.sample())[4]
        assert len(infos) == N
        seen += sum("final_obs" in info for info in infos)
    assert seen >= 2 * N


@pytest.mark.parametrize("task_id", ["unilab_fabric/Go2JoystickFlat-v0", "unilab_fabric/CartpoleSwingup-v0"])
def test_a_module_prefix_registers_the_tasks(task_id):
    env = gymnasium.make_vec(f"unilab_fabric.envs:{task_id}", num_envs=2, num_threads=1)
    assert env.spec.id == task_id
    assert env.num_envs == 2
