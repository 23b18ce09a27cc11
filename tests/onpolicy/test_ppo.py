"""PPO against hand-worked numbers, against RSL-RL's own runner, and over ranks."""

import dataclasses
import math

import pytest
import torch
from rsl_rl.env import VecEnv
from rsl_rl.runners import OnPolicyRunner as RslRlRunner
from tensordict import TensorDict

from tests.learners.problems import CPU, mirrors, spec
from tests.loop.test_checkpoints import Recorder, assert_same_state
from tests.offpolicy.runs import run, weights
from tests.ranks import run_ranks
from unilab_fabric.checkpoints import whole_checkpoints
from unilab_fabric.config import CheckpointConfig
from unilab_fabric.errors import UserError
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.onpolicy.rsl_rl_files import read_model, write_model
from unilab_fabric.parallel.reduce import Ranks

torch.set_num_threads(1)
SMALL = PPO(
    actor_hidden=(32, 16), critic_hidden=(32, 16), num_steps_per_env=6, num_learning_epochs=2, num_mini_batches=2
)
SHORT = {"num_envs": 8, "episode_s": 0.3, "stagger": True}
"""Cart-poles whose episodes end all the time, by time limit."""


def build(settings=SMALL, task=None, *, ranks=None, seed=1):
    return settings.build(task or spec(), CPU, "32-true", ranks or Ranks(), seed, 1)


def transitions(task, ticks, seed=0):
    """Observations of `ticks` + 1 ticks, and rewards, terminations and ended environments of `ticks`."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    observations = [(normal(32, task.actor_size), normal(32, task.critic_size)) for _ in range(ticks + 1)]
    steps = []
    for _ in range(ticks):
        ended = (torch.rand(32, generator=generator) < 0.1).nonzero().flatten()
        terminated = torch.zeros(32, dtype=torch.bool)
        terminated[ended[::2]] = True
        steps.append((normal(32), terminated, ended, normal(len(ended), task.critic_size)))
    return observations, steps


def iterate(learner, observations, steps):
    """One iteration of a learner on given transitions; the actions."""
    actions = []
    for observation, step in zip(observations, steps, strict=False):
        actions.append(learner.act(observation[0]))
        learner.keep(*observation)
        learner.record(*step)
    learner.learn(*observations[-1])
    return actions


# ---- values by hand -------------------------------------------------------------------------------------------------


def test_a_time_limit_bootstraps_from_the_true_last_observation_and_a_failure_does_not(monkeypatch):
    """The value of an observation is its first entry; discount 1/2, lambda 1, so returns can be added up by hand."""
    task = dataclasses.replace(spec(actor=1, critic=1), num_envs=3)
    exact = {"discount": 0.5, "lam": 1.0, "normalize_observations": False}
    settings = dataclasses.replace(SMALL, num_steps_per_env=3, num_mini_batches=1, **exact)
    learner = build(settings, task)
    monkeypatch.setattr(learner.algorithm, "critic", Value())
    monkeypatch.setattr(learner.algorithm, "update", lambda: {"value": 0.0, "surrogate": 0.0, "entropy": 0.0})
    # environment 0 runs through; 1 is ended by its time limit at tick 1 and shows 100 there; 2 fails at tick 1
    for tick in range(3):
        observation = torch.full((3, 1), 10.0 * tick)
        learner.act(observation)
        learner.keep(observation, observation)
        ended = torch.tensor([1, 2]) if tick == 1 else torch.zeros(0, dtype=torch.int64)
        terminated = torch.tensor([False, False, tick == 1])
        last = torch.tensor([[100.0], [200.0]])[: len(ended)]
        learner.record(torch.ones(3), terminated, ended, last)
    following = torch.full((3, 1), 30.0)
    learner.learn(following, following)
    returns = learner.algorithm.storage.returns.squeeze(-1)
    third = 1 + 0.5 * 30
    assert returns[2].tolist() == [third, third, third]
    second = [1 + 0.5 * third, 1 + 0.5 * 100, 1]
    assert returns[1].tolist() == second
    assert returns[0].tolist() == [1 + 0.5 * value for value in second]


class Value:
    """A critic that gives the first entry of its observation."""

    def __call__(self, observation):
        return observation["critic"][:, :1]

    def get_hidden_state(self):
        return None

    def reset(self, **_):
        pass


# ---- against RSL-RL -------------------------------------------------------------------------------------------------


class Replayed(VecEnv):
    """Shows given transitions to RSL-RL's runner, whatever the actions are."""

    def __init__(self, task, observations, steps):
        self.num_envs, self.num_actions, self.max_episode_length = task.num_envs, task.action_size, 100
        self.device, self.cfg = "cpu", {}
        self.episode_length_buf = torch.zeros(task.num_envs)
        self._observations, self._steps, self._tick = observations, steps, 0
        self.actions = []

    def get_observations(self):
        actor, critic = self._observations[self._tick]
        return TensorDict({"actor": actor, "critic": critic}, [self.num_envs])

    def step(self, actions):
        self.actions.append(actions)
        reward, _, ended, _ = self._steps[self._tick]
        self._tick += 1
        dones = torch.zeros(self.num_envs).index_fill_(0, ended, 1)
        return self.get_observations(), reward, dones, {}


def rsl_rl_runner(settings, env, log_dir=None):
    """RSL-RL's own runner with our settings."""
    model = {"class_name": "MLPModel", "activation": settings.activation, "obs_normalization": True}
    gaussian = {"class_name": "GaussianDistribution", "init_std": settings.init_std, "std_type": settings.std_type}
    same = (
        "num_learning_epochs num_mini_batches clip_param lam value_loss_coef entropy_coef learning_rate max_grad_norm "
        "use_clipped_value_loss schedule desired_kl"
    )
    return RslRlRunner(
        env,
        {
            "num_steps_per_env": settings.num_steps_per_env,
            "save_interval": 100,
            "logger": "tensorboard",
            "obs_groups": {"actor": ["actor"], "critic": ["critic"]},
            "actor": {**model, "hidden_dims": settings.actor_hidden, "distribution_cfg": gaussian},
            "critic": {**model, "hidden_dims": settings.critic_hidden},
            "algorithm": {
                "class_name": "PPO",
                "gamma": settings.discount,
                **{name: getattr(settings, name) for name in same.split()},
            },
        },
        log_dir=log_dir,
    )


def test_an_iteration_without_time_limits_is_rsl_rl_s(tmp_path):
    task = spec()
    observations, steps = transitions(task, SMALL.num_steps_per_env)
    steps = [(reward, torch.ones(32, dtype=torch.bool), ended, last) for reward, _, ended, last in steps]
    learner = build(SMALL, task)
    theirs = rsl_rl_runner(SMALL, Replayed(task, observations, steps))
    write_model(tmp_path / "model_0.pt", learner, 0)
    theirs.load(str(tmp_path / "model_0.pt"))
    torch.manual_seed(7)
    actions = iterate(learner, observations, steps)
    torch.manual_seed(7)
    theirs.learn(1)
    for own, other in zip(actions, theirs.env.actions, strict=True):
        torch.testing.assert_close(own, other, rtol=0.0, atol=1e-6)
    assert float(learner.replicated["learning_rate"]) == pytest.approx(theirs.alg.learning_rate)
    assert theirs.alg.learning_rate != SMALL.learning_rate  # the divergence has moved it
    for model, other in ((learner.algorithm.actor, theirs.alg.actor), (learner.algorithm.critic, theirs.alg.critic)):
        for (name, tensor), value in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
            torch.testing.assert_close(tensor, value, rtol=1e-4, atol=2e-5, msg=name)


def test_a_file_that_rsl_rl_wrote_gives_the_same_policy_and_goes_on_alike(tmp_path):
    task = spec()
    observations, steps = transitions(task, SMALL.num_steps_per_env)
    theirs = rsl_rl_runner(SMALL, Replayed(task, observations, steps), log_dir=str(tmp_path))
    theirs.learn(1)
    learner = build(SMALL, task, seed=5)
    read_model(tmp_path / "model_0.pt", learner)
    actor, critic = observations[2]
    expected = theirs.alg.actor.eval()(TensorDict({"actor": actor, "critic": critic}, [32]))
    torch.testing.assert_close(learner.policy()(actor), expected, rtol=1e-5, atol=1e-6)
    assert float(learner.replicated["learning_rate"]) == pytest.approx(theirs.alg.learning_rate)
    assert int(learner.replicated["actor/mlp.0.weight/step"]) == SMALL.steps_per_iteration
    write_model(tmp_path / "ours.pt", learner, 1)
    again = rsl_rl_runner(SMALL, Replayed(task, observations, steps))
    again.load(str(tmp_path / "ours.pt"))
    for own, other in zip(again.alg.actor.state_dict().values(), theirs.alg.actor.state_dict().values(), strict=True):
        assert torch.equal(own, other)
    before, after = (one.alg.optimizer.state_dict()["state"] for one in (theirs, again))
    assert all(torch.equal(before[i]["exp_avg_sq"], after[i]["exp_avg_sq"]) for i in before)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"not a checkpoint", "it cannot be read"),
        ({"model_state_dict": {}}, "it is not as RSL-RL 5 writes it ('actor_state_dict'); allowed: model_*.pt"),
        ([1, 2], "it holds no mapping"),
    ],
)
def test_a_file_that_is_something_else_is_refused_in_one_line(tmp_path, content, told):
    path = tmp_path / "model_1.pt"
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(UserError, match=r"learner\.start_from is ") as refused:
        read_model(path, build())
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_of_other_networks_names_what_differs(tmp_path):
    write_model(tmp_path / "model_0.pt", build(dataclasses.replace(SMALL, actor_hidden=(64, 16))), 0)
    with pytest.raises(UserError, match=r"actor/mlp\.0\.weight"):
        read_model(tmp_path / "model_0.pt", build())


# ---- ranks ----------------------------------------------------------------------------------------------------------


def trained_rank(ranks, settings, iterations, poison):
    learner = build(settings, ranks=ranks, seed=1 + ranks.rank)
    for name, tensor in learner.replicated.items():
        ranks.broadcast_(tensor, name)
    for iteration in range(iterations):
        observations, steps = transitions(spec(), settings.num_steps_per_env, seed=100 * ranks.rank + iteration)
        if poison == ranks.rank and iteration == 1:
            steps[2][0][3] = math.nan
        iterate(learner, observations, steps)
    state = {name: tensor.clone() for name, tensor in learner.replicated.items()}
    return state, learner.skipped.read(), learner.generators["torch"].get_state()


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_and_learning_rates_stay_bitwise_equal(world_size):
    results = run_ranks(trained_rank, [(SMALL, 10, None)] * world_size)
    first, _, generator = results[0]
    for state, _, other in results[1:]:
        assert [name for name in first if not torch.equal(first[name], state[name])] == []
        assert not torch.equal(generator, other)
    assert float(first["learning_rate"]) != SMALL.learning_rate


def test_statistics_of_observations_are_those_of_all_ranks_together():
    (state, _, _), _ = run_ranks(trained_rank, [(SMALL, 2, None)] * 2)
    parts = [
        transitions(spec(), SMALL.num_steps_per_env, seed=100 * rank + i)[0][:-1] for rank in (0, 1) for i in (0, 1)
    ]
    joined = torch.cat([actor for part in parts for actor, _ in part])
    torch.testing.assert_close(state["actor/obs_normalizer._mean"].squeeze(0), joined.mean(0), rtol=1e-4, atol=1e-5)
    variance = joined.var(0, unbiased=False)
    torch.testing.assert_close(state["actor/obs_normalizer._var"].squeeze(0), variance, rtol=1e-4, atol=1e-5)


def test_a_reward_that_is_not_finite_on_one_rank_skips_the_steps_on_both_and_names_it():
    (state, skips, _), (other, _, _) = run_ranks(trained_rank, [(SMALL, 3, 1)] * 2)
    assert skips.total == SMALL.steps_per_iteration
    assert skips.by_rank == {"policy": [0, SMALL.steps_per_iteration]}
    assert skips.in_row == {"policy": 0}
    assert all(tensor.isfinite().all() for tensor in state.values())
    assert [name for name in state if not torch.equal(state[name], other[name])] == []


# ---- whole runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [1, 6, 7, 31])
def test_a_stop_at_any_tick_leaves_no_trace(tmp_path, stop):
    """A stop waits for the end of its iteration of six ticks."""
    common = {"init_args": SHORT, "learner": SMALL}
    straight = run(tmp_path / "a", 48, **common)
    first = run(tmp_path / "b", 48, until=stop, **common)
    assert first.tick == -(-stop // 6) * 6
    second = run(tmp_path / "b", 48, resume=whole_checkpoints(tmp_path / "b")[-1], **common)
    assert second.warning == ""
    assert (second.tick, second.env_steps) == (straight.tick, straight.env_steps) == (48, 48 * 8)
    assert second._learner.updates == straight._learner.updates == 8 * SMALL.steps_per_iteration
    same = [name for name, tensor in weights(straight).items() if torch.equal(tensor, weights(second)[name])]
    assert same == list(weights(straight))


def test_a_killed_run_goes_on_from_any_checkpoint_and_reports_the_same(tmp_path):
    checkpoint = CheckpointConfig(every=7, keep_last=100, keep_best=False)
    straight, again = Recorder(), Recorder()
    common = {"init_args": SHORT, "learner": SMALL, "checkpoint": checkpoint}
    run(tmp_path / "a", 60, hooks=[straight], **common)
    saved = [path.name for path in whole_checkpoints(tmp_path / "a")]
    assert saved == [f"tick-{tick:09d}" for tick in (12, 18, 24, 30, 36, 42, 54, 60)]
    run(tmp_path / "b", 60, hooks=[again], resume=tmp_path / "a/checkpoints/tick-000000018", **common)
    assert again.reports == [report for report in straight.reports if report[0] > 18]
    assert_same_state(tmp_path / "a", tmp_path / "b")


def test_a_run_ends_with_the_iteration_that_reaches_its_steps(tmp_path):
    runner = run(tmp_path, 13, init_args=SHORT, learner=SMALL)
    assert runner.tick == runner.last_tick == 18


def test_mirror_images_double_each_mini_batch_and_teach_both_sides():
    task = dataclasses.replace(spec(mirrors=mirrors()), action_low=(-1.0,) * 3, action_high=(1.0,) * 3)
    learner = build(dataclasses.replace(SMALL, symmetry=True), task)
    images = learner.algorithm.symmetry.data_augmentation_func
    observations, steps = transitions(task, SMALL.num_steps_per_env)
    actor, critic = observations[0]
    twice, actions = images(None, TensorDict({"actor": actor, "critic": critic}, [32]), torch.ones(32, 3))
    assert twice.batch_size == torch.Size([64])
    assert torch.equal(twice["actor"][32:, 0], actor[:, 1])
    assert torch.equal(twice["critic"][32:, -1], -critic[:, -1])
    assert actions[32].tolist() == [1.0, 1.0, -1.0]
    before = learner.replicated["actor/mlp.0.weight"].clone()
    iterate(learner, observations, steps)
    assert not torch.equal(before, learner.replicated["actor/mlp.0.weight"])
    with pytest.raises(UserError, match="has no mirror images"):
        build(dataclasses.replace(SMALL, symmetry=True))


def test_settings_that_cannot_work_are_told_by_name():
    wrong = PPO(num_mini_batches=0, clip_param=0.0, lam=2.0, actor_hidden=(), discount=-0.1)
    told = [str(problem) for problem in wrong.problems(8)]
    assert [text.split(" is ")[0] for text in told] == [
        f"learner.{name}"
        for name in ("actor_hidden", "num_mini_batches", "clip_param", "discount", "lam", "num_mini_batches")
    ]
    assert PPO().problems(8) == []
    (small,) = PPO(num_mini_batches=100).problems(8)
    assert str(small).endswith("1 to 96, so that the 192 transitions of an iteration give each two or more")
