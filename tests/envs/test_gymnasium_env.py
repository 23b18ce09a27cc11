from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Dict, Discrete
from gymnasium.vector import AutoresetMode, VectorEnv

from unilab_fabric.envs.gymnasium_env import AdaptedTask
from unilab_fabric.envs.registry import make_task
from unilab_fabric.envs.vector_env import StateUnavailable
from unilab_fabric.errors import UserError


class Recorder(gymnasium.Env):
    """Observation: its number, steps since reset (2, 2 entries); reward: the action's sum; fails at 10 steps."""

    observation_space = Box(-np.inf, np.inf, (2, 2), np.float64)
    action_space = Box(np.array([0.0, -4.0]), np.array([1.0, 4.0]), dtype=np.float64)

    def __init__(self, bad_reward_at=-1):
        self.bad_reward_at = bad_reward_at
        self.steps = 0

    def _observe(self):
        return np.full((2, 2), float(self.steps))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observe(), {}

    def step(self, action):
        assert action in self.action_space
        self.steps += 1
        reward = float("nan") if self.steps == self.bad_reward_at else float(action.sum())
        return self._observe(), reward, self.steps == 10, False, {}


@pytest.fixture(autouse=True)
def registered():
    gymnasium.register(id="Recorder-v0", entry_point=Recorder, max_episode_steps=4)
    yield
    del gymnasium.registry["Recorder-v0"]


def recorder(num_envs=2, **env_kwargs):
    return make_task("gymnasium:Recorder-v0", {"num_envs": num_envs, "env_kwargs": env_kwargs}, seed=1, num_threads=1)


def test_sizes_are_those_of_the_flattened_boxes_and_the_policy_acts_between_minus_one_and_one():
    spec = recorder().task_spec()
    assert (spec.actor_size, spec.critic_size) == (4, 4)
    assert (spec.action_low, spec.action_high) == ((-1, -1), (1, 1))
    assert spec.name == "gymnasium:Recorder-v0"


@pytest.mark.parametrize(
    ("action", "sum_in_the_environment"), [([-1, -1], 0 - 4), ([1, 1], 1 + 4), ([0, 0], 0.5 + 0), ([0, 0.5], 0.5 + 2)]
)
def test_actions_are_rescaled_to_the_bounds(action, sum_in_the_environment):
    task = recorder(1)
    task.reset()
    task.advance(np.array([action], np.float32))
    assert task.reward[0] == pytest.approx(sum_in_the_environment)


def test_a_time_limit_is_a_truncation_with_the_true_last_observation():
    task = recorder()
    task.reset()
    for _ in range(4):
        task.advance(np.zeros((2, 2), np.float32))
    assert task.truncated.all()
    assert not task.terminated.any()
    assert task.next_observation["actor"].tolist() == [[4] * 4] * 2
    assert task.observation["critic"].tolist() == [[0] * 4] * 2


def test_a_faulty_environment_is_reset_alone():
    task = recorder(bad_reward_at=3)
    task.reset()
    for _ in range(2):
        task.advance(np.zeros((2, 2), np.float32))
    task.env.envs[1].unwrapped.bad_reward_at = -1
    task.advance(np.zeros((2, 2), np.float32))
    assert task.terminated.tolist() == [True, False]
    assert task.reward.tolist() == [0, 0.5]
    assert task.observation["actor"][:, 0].tolist() == [0, 3]
    task.advance(np.zeros((2, 2), np.float32))
    assert task.next_observation["actor"][:, 0].tolist() == [1, 4]
    assert task.truncated.tolist() == [False, True]


def test_its_state_cannot_be_saved_and_it_says_so():
    task = recorder()
    with pytest.raises(StateUnavailable, match="gymnasium:Recorder-v0 is a Gymnasium environment"):
        task.get_state()
    with pytest.raises(StateUnavailable, match="gymnasium:Recorder-v0"):
        task.set_state({})


def test_seeds_reach_the_environments():
    def start(seed):
        return make_task("gymnasium:Pendulum-v1", {"num_envs": 3}, seed=seed, num_threads=1).reset()[0]["actor"]

    assert start(1).tolist() == start(1).tolist()
    assert start(1).tolist() != start(2).tolist()


def test_a_second_reset_is_not_the_first_again():
    task = make_task("gymnasium:Pendulum-v1", {"num_envs": 3}, seed=1, num_threads=1)
    assert task.reset()[0]["actor"].tolist() != task.reset()[0]["actor"].tolist()


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("gymnasium:CartPole-v1", r"allowed: actions in a Box of floating-point numbers, not Discrete\(2\)"),
        ("gymnasium:FrozenLake-v1", r"allowed: observations in a Box, or a Dict with Boxes actor and critic, not Disc"),
    ],
)
def test_other_spaces_are_refused(task, message):
    with pytest.raises(UserError, match=message):
        make_task(task, {"num_envs": 2}, seed=0, num_threads=1)


class Spaces(VectorEnv):
    """A vector environment of spaces only."""

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}
    num_envs = 2

    def __init__(self, observation, action, **metadata):
        self.single_observation_space = observation
        self.single_action_space = action
        self.metadata = {**self.metadata, **metadata}


BOX = Box(-1, 1, (3,), np.float32)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Spaces(Dict({"actor": BOX}), BOX), "allowed: observations in a Box, or a Dict with Boxes actor and critic"),
        (Spaces(Dict({"actor": BOX, "critic": Discrete(2)}), BOX), "allowed: observations in a Box, or a Dict"),
        (Spaces(BOX, Box(-np.inf, np.inf, (3,), np.float32)), "allowed: actions with finite bounds"),
        (Spaces(BOX, Box(0, 3, (3,), np.int64)), "allowed: actions in a Box of floating-point numbers"),
        (Spaces(BOX, BOX, autoreset_mode=AutoresetMode.NEXT_STEP), "task is Spaces; allowed: same-step autoreset"),
    ],
)
def test_a_vector_environment_that_does_not_fit_is_refused(env, message):
    with pytest.raises(UserError, match=message):
        AdaptedTask(env, name="Spaces")


def test_a_dict_of_actor_and_critic_keeps_them_apart():
    task = AdaptedTask(Spaces(Dict({"actor": BOX, "critic": Box(-1, 1, (2, 2), np.float32)}), BOX), name="Spaces")
    assert (task.task_spec().actor_size, task.task_spec().critic_size) == (3, 4)


def test_an_environment_that_only_vectorises_itself_is_taken_as_it_is():
    task = make_task("gymnasium:unilab_fabric/CartpoleSwingup-v0", {"num_envs": 2}, seed=0, num_threads=1)
    task.reset()
    task.advance(np.zeros((2, 1), np.float32))
    assert task.task_spec().actor_size == 5
    assert task.reward.shape == (2,)
