import dataclasses

import pytest
import torch

from tests.learners.problems import batch, build, config, join, mirrors, spec
from tests.learners.reference import PlainFastSAC, difference
from tests.ranks import run_ranks
from unilab_fabric.learners.fast_sac.learner import FastSACLearner
from unilab_fabric.parallel.replica import checksum

HORIZON = 10


def learner_and_reference(settings, task):
    learner = build(settings, task, total_updates=HORIZON)
    return learner, PlainFastSAC(learner, settings, task, HORIZON)


def assert_close(learner, plain, tolerance):
    assert difference(plain.actor, learner.actor.net, 0) < tolerance
    for member, (critic, target) in enumerate(zip(plain.critics, plain.targets, strict=True)):
        assert difference(critic, learner.critic.net, member) < tolerance
        assert difference(target, learner.target.net, member) < tolerance
    assert abs(learner.log_temperature.item() - plain.log_temperature.item()) < tolerance


@pytest.mark.parametrize("kernels", ["auto", "off"])
@pytest.mark.parametrize(
    ("settings", "task"),
    [
        ({"normalize_observations": False}, {}),
        ({"normalize_observations": True}, {}),
        ({"normalize_observations": True, "max_grad_norm": 0.1}, {"actor": 9, "critic": 9}),
        ({"normalize_observations": False, "final_lr_fraction": 0.2, "actor_every": 1}, {"actor": 1}),
        ({"num_critics": 1, "target_entropy_ratio": 0.5, "weight_decay": 0.1, "updates_per_tick": 1}, {}),
        ({"num_critics": 3, "actor_hidden": (16,), "critic_hidden": (32, 24, 16), "actor_every": 3}, {}),
    ],
)
def test_updates_follow_a_plain_float64_implementation(settings, task, kernels):
    task = spec(**task)
    learner, plain = learner_and_reference(config(**settings, kernels=kernels), task)
    for index in range(6):
        transitions = batch(task, seed=index)
        learner.update(transitions, index)
        plain.update(transitions, index)
    assert_close(learner, plain, 2e-5)
    assert learner.skipped.read().total == 0


def test_symmetry_learns_from_reflected_transitions():
    task = spec(mirrors=mirrors())
    settings = config(symmetry=True)
    learner, plain = learner_and_reference(settings, task)
    transitions = batch(task)
    reflected = {
        name: torch.cat([rows[:12], torch.cat([rows[12:, [1, 0]], rows[12:, 2:-1], -rows[12:, -1:]], dim=1)])
        for name, rows in vars(transitions).items()
        if rows.dim() == 2
    }
    learner.update(transitions, 0)
    plain.update(dataclasses.replace(transitions, **reflected), 0)
    assert_close(learner, plain, 2e-5)


def test_metrics_report_the_losses_of_the_plain_implementation():
    task = spec()
    learner, _ = learner_and_reference(config(temperature=0.05), task)
    for index in range(4):
        learner.update(batch(task, seed=index), index)
    counts = dict(zip(learner.metric_names, learner.metrics[:, 1].tolist(), strict=True))
    assert counts["Loss/critic"] == 4
    assert counts["Loss/actor"] == 2
    means = dict(zip(learner.metric_names, (learner.metrics[:, 0] / learner.metrics[:, 1]).tolist(), strict=True))
    assert means["Policy/temperature"] == pytest.approx(0.05, rel=0.02)
    assert means["Loss/learning_rate"] == pytest.approx(2e-3)
    assert 0 < means["Policy/mean_std"] < 0.2  # a fresh policy has 0.0821
    assert 0 < means["Loss/critic"] < 2 * 4.0  # two critics, log 21 = 3.04 for the uniform distribution


def test_the_target_takes_on_a_share_tau_of_the_critic_at_each_update():
    task = spec()
    learner = build(config(tau=0.125), task)
    start = learner.target_flat.values.clone()
    assert torch.equal(start, learner.critic_flat.values)
    learner.update(batch(task), 0)
    torch.testing.assert_close(learner.target_flat.values, 0.875 * start + 0.125 * learner.critic_flat.values)


def test_critics_with_the_same_parameters_get_the_same_gradient():
    task = spec()
    learner = build(config(), task)
    with torch.no_grad():
        for module in (learner.critic, learner.target):
            for parameter in module.parameters():
                parameter[1] = parameter[0]
    learner.update(batch(task), 1)  # an update without an actor step
    for parameter in learner.critic.parameters():
        assert torch.equal(parameter[0], parameter[1])


def test_one_tick_at_the_defaults_has_8_critic_and_2_actor_steps():
    task = spec()
    learner = build(config(updates_per_tick=8, actor_every=4), task)
    for index in range(8):
        learner.update(batch(task, seed=index), index)
    steps = {name: learner.replicated[f"{name}/step"].item() for name in ("critic", "log_temperature", "actor")}
    assert steps == {"critic": 8, "log_temperature": 8, "actor": 2}


def test_the_actor_step_leaves_the_critic_alone():
    task = spec()
    learner = build(config(), task)
    learner.update(batch(task), 0)
    gradient = learner.critic_flat.gradient.clone()
    learner._update_actor(batch(task))
    assert torch.equal(learner.critic_flat.gradient, gradient)


def test_flat_views_survive_everything_that_the_runner_calls():
    task = spec()
    learner = build(config(), task)
    for index in range(3):
        learner.act(torch.randn(5, 6))
        learner.update(batch(task, seed=index), index)
        learner.policy()(torch.randn(5, 6))
    for tensor in learner.replicated.values():
        tensor.copy_(tensor.clone())
    for flat in (learner.actor_flat, learner.critic_flat, learner.target_flat):
        flat.check_views()


def trained(settings, task, indices, precision="32-true"):
    learner = build(settings, task, precision=precision)
    for index in indices:
        learner.update(batch(task, seed=index), index)
        learner.act(batch(task, seed=index).actor)
    return learner


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_the_same_seed_gives_the_same_bits(precision, kernels):
    first, second = (trained(config(kernels=kernels), spec(), range(6), precision) for _ in range(2))
    assert torch.equal(checksum(first.replicated), checksum(second.replicated))


@pytest.mark.parametrize("kernels", ["auto", "off"])
def test_bf16_moves_the_parameters_where_float32_does(kernels):
    task, start = spec(), build(config(), spec())
    exact = trained(config(), task, range(12))
    rounded = trained(config(kernels=kernels), task, range(12), "bf16-mixed")
    for name in ("critic_flat", "actor_flat", "target_flat"):
        first, right, own = (getattr(learner, name).values for learner in (start, exact, rounded))
        assert torch.cosine_similarity(own - first, right - first, dim=0).item() > 0.9
        assert own.dtype == torch.float32


def test_replicated_state_and_generators_are_all_that_a_checkpoint_needs():
    task, settings = spec(), config(random_ticks=2, final_lr_fraction=0.1)
    expected = trained(settings, task, range(8))
    half = trained(settings, task, range(4))
    resumed = build(settings, task, seed=99)
    for name, tensor in resumed.replicated.items():
        tensor.copy_(half.replicated[name])
    for name, generator in resumed.generators.items():
        generator.set_state(half.generators[name].get_state())
    for index in range(4, 8):
        resumed.update(batch(task, seed=index), index)
        resumed.act(batch(task, seed=index).actor)
    assert torch.equal(checksum(expected.replicated), checksum(resumed.replicated))


def test_the_first_ticks_act_uniformly_and_then_the_policy_does():
    task = spec()
    learner = build(config(random_ticks=2), task)
    observation = torch.randn(2000, 6)
    low, high = torch.tensor(task.action_low), torch.tensor(task.action_high)
    for _ in range(2):
        action = (learner.act(observation) - low) / (high - low)
        torch.testing.assert_close(action.mean(0), torch.full((3,), 0.5), atol=0.03, rtol=0.0)
        torch.testing.assert_close(action.var(0), torch.full((3,), 1 / 12), atol=0.01, rtol=0.0)
    action = (learner.act(observation) - low) / (high - low)
    assert (action.std(0) < 0.06).all()  # std 0.0821 before tanh, over a range of 2


def test_the_policy_is_deterministic_and_the_mean_of_what_acts():
    task = spec()
    learner = trained(config(), task, range(4))
    observation = torch.randn(1, 6).expand(4000, 6)
    assert torch.equal(learner.policy()(observation), learner.policy()(observation))
    torch.testing.assert_close(learner.act(observation).mean(0), learner.policy()(observation)[0], atol=0.02, rtol=0.0)


# Several ranks


def parameters_after(ranks, settings, task, batches, poison=None):
    """Updates on one batch per tick; `poison` is (rank, index) of a batch that holds a reward that is not a number."""
    learner = build(settings, task, seed=1, ranks=ranks)
    for index, transitions in enumerate(batches):
        if poison == (ranks.rank, index):
            transitions.reward[3] = torch.nan
        learner.update(transitions, index)
    return {name: tensor.clone() for name, tensor in learner.replicated.items()}


def assert_equal_bits(states):
    for other in states[1:]:
        assert [name for name in other if not torch.equal(states[0][name], other[name])] == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_stay_bitwise_equal_over_200_updates(world_size):
    task, settings = spec(), config(normalize_observations=True)
    own = [[batch(task, seed=1000 * rank + index) for index in range(200)] for rank in range(world_size)]
    states = run_ranks(parameters_after, [(settings, task, batches) for batches in own])
    assert_equal_bits(states)
    assert states[0]["updates"].item() == 200


def without_noise(monkeypatch):
    monkeypatch.setattr(FastSACLearner, "_standard_normal", lambda self, rows: torch.zeros(len(rows), 3))


def parameters_without_noise(ranks, settings, task, batches):
    with pytest.MonkeyPatch.context() as monkeypatch:
        without_noise(monkeypatch)
        return parameters_after(ranks, settings, task, batches)


@pytest.mark.parametrize("normalise", [True, False])
def test_two_ranks_on_halves_of_each_batch_learn_like_one_on_the_whole(normalise):
    task, settings = spec(), config(normalize_observations=normalise, max_grad_norm=0.5, updates_per_tick=1)
    halves = [[batch(task, seed=10 * rank + index) for index in range(4)] for rank in range(2)]
    states = run_ranks(parameters_without_noise, [(settings, task, batches) for batches in halves])
    assert_equal_bits(states)
    whole = [join(pair) for pair in zip(*halves, strict=True)]
    (expected,) = run_ranks(parameters_without_noise, [(settings, task, whole)])
    for name, value in expected.items():
        torch.testing.assert_close(states[0][name], value, atol=1e-5, rtol=1e-4, msg=name)


def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_both():
    task, settings = spec(), config()
    own = [[batch(task, seed=100 * rank + index) for index in range(3)] for rank in range(2)]
    states = run_ranks(parameters_after, [(settings, task, batches, (1, 2)) for batches in own])
    assert_equal_bits(states)
    assert states[0]["skipped_updates"].item() == 1
    assert states[0]["skipped_updates/in_row"].tolist() == [1, 0]  # of critic and actor
    assert states[0]["critic/step"].item() == 2
    assert all(tensor.isfinite().all() for tensor in states[0].values())
    before = run_ranks(parameters_after, [(settings, task, batches[:2]) for batches in own])
    for name in ("critic", "target_critic", "log_temperature", "critic/exp_avg", "critic/normaliser/mean"):
        assert torch.equal(states[0][name], before[0][name])


def skips_after(ranks, settings, task, batches, bad):
    learner = build(settings, task, ranks=ranks)
    for index, one in enumerate(batches):
        learner.update(poisoned(one) if index in bad else one, index)
    return learner.skipped.read()


def poisoned(one):
    return dataclasses.replace(one, reward=one.reward * torch.nan)


def test_all_ranks_know_whose_gradient_it_was_and_how_many_steps_in_a_row():
    task, settings = spec(), config()
    batches = [batch(task, seed=index) for index in range(4)]
    first, second = run_ranks(skips_after, [(settings, task, batches, ()), (settings, task, batches, (2, 3))])
    assert first == second
    assert first.total == 2
    assert first.in_row == {"critic": 2, "actor": 0}
    assert first.by_rank == {"critic": [0, 2], "actor": [0, 0]}


def broadcast_state(ranks, settings, task):
    learner = build(settings, task, seed=ranks.rank, ranks=ranks)
    for tensor in learner.replicated.values():
        ranks.broadcast_(tensor, "state")
    return dict(learner.replicated), learner.policy()(torch.ones(1, 6)), learner.act(torch.ones(1, 6))


def test_a_broadcast_of_the_replicated_state_makes_ranks_one_but_not_their_noise():
    results = run_ranks(broadcast_state, [(config(), spec())] * 2)
    assert_equal_bits([state for state, _, _ in results])
    assert torch.equal(results[0][1], results[1][1])
    assert not torch.equal(results[0][2], results[1][2])
