import dataclasses
import math

import pytest
import torch

from tests.learners.plain_flash_sac import PlainFlashSAC, PlainNet
from tests.learners.problems import CPU, batch, mirrors, spec
from tests.ranks import run_ranks
from unilab_fabric.errors import UserErrors
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.flash_sac.layers import Arithmetic, FlashNet, UnitBatchNorm, UnitLinear, UnitRMSNorm
from unilab_fabric.learners.flash_sac.losses import cosine_rate, entropy_of_std, least_optimistic
from unilab_fabric.learners.flash_sac.noise import HeldNoise
from unilab_fabric.learners.flash_sac.rewards import RewardScale, merged
from unilab_fabric.learners.kernels import load_kernels
from unilab_fabric.parallel.reduce import Ranks

HORIZON = 12


def config(**changed):
    settings = {
        "actor_width": 16,
        "critic_width": 24,
        "blocks": 2,
        "atoms": 21,
        "batch_size": 24,
        "learning_rate": 1e-3,
        "final_learning_rate": 1e-4,
        "tau": 0.1,
    }
    return FlashSAC(**(settings | changed))


def build(settings, task, *, seed=1, ranks=None, precision="32-true", total_updates=HORIZON):
    return settings.build(task, CPU, precision, ranks or Ranks(), seed, total_updates)


def ticks(task, count, seed=0):
    """Rewards and ended environments of some ticks."""
    generator = torch.Generator().manual_seed(100 + seed)
    for _ in range(count):
        reward = 1.0 + torch.randn(task.num_envs, generator=generator)
        yield reward, (torch.rand(task.num_envs, generator=generator) < 0.1).nonzero().flatten()


def difference(net, member, plain):
    other = PlainNet(net, member)
    pairs = zip(plain.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"actor_every": 1, "updates_per_tick": 1},
        {"blocks": 1, "actor_every": 3, "max_return": 2.0, "temperature": 0.3},
    ],
)
def test_updates_follow_a_plain_float64_implementation(settings):
    task, settings = spec(), config(**settings)
    learner = build(settings, task)
    plain = PlainFlashSAC(learner, settings, task, HORIZON)
    noise = learner.generators["noise"]
    for index in range(6):
        if index % settings.updates_per_tick == 0:
            for reward, ended in ticks(task, 2, seed=index):
                learner.observe(reward, ended)
                plain.observe(reward, ended)
        transitions = batch(task, seed=index)
        learner.update(transitions, index)
        plain.update(transitions, index)
        assert torch.equal(noise.get_state(), plain.noise.get_state())
    assert difference(learner.actor.net, 0, plain.actor) < 3e-5
    for member in range(2):
        assert difference(learner.critic, member, plain.critics[member]) < 3e-5
        assert difference(learner.target, member, plain.targets[member]) < 3e-5
    half = learner.critic.channels // 2
    for net, members in [(learner.critic, plain.critics), (learner.target, plain.targets)]:
        for member, other in enumerate(members):
            own = net.running[:, member * half : (member + 1) * half].double()
            torch.testing.assert_close(own, other.statistics(), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(learner.actor.net.running.double(), plain.actor.statistics(), atol=1e-5, rtol=1e-4)
    assert abs(learner.log_temperature.item() - plain.log_temperature.item()) < 1e-6
    assert learner.skipped.read().total == 0


def trained(settings, task, updates=8, **more):
    learner = build(settings, task, **more)
    for index in range(updates):
        for reward, ended in ticks(task, 1, seed=index):
            learner.observe(reward, ended)
        learner.update(batch(task, seed=index), index)
    return learner


def test_every_layer_has_its_norm_after_every_step():
    learner = trained(config(), spec())
    for net in (learner.critic, learner.actor.net):
        found = 0
        for module in net.modules():
            if isinstance(module, UnitLinear):
                lengths = module.weight.norm(dim=-1)
                torch.testing.assert_close(lengths, torch.ones_like(lengths))
                found += 1
            if isinstance(module, UnitBatchNorm):
                both = (module.weight**2 + module.bias**2).sum(-1)
                torch.testing.assert_close(both, torch.full_like(both, module.width))
                found += 1
            if isinstance(module, UnitRMSNorm):
                square = (module.weight**2).sum(-1)
                torch.testing.assert_close(square, torch.full_like(square, module.width))
        assert found == 11
    rows = learner.target.embedder.weight.norm(dim=-1)
    assert (rows < 1 + 1e-6).all()  # a mean of unit vectors is no longer


def test_acting_and_judging_change_no_running_statistics():
    task = spec()
    learner = trained(config(), task)
    before = {name: tensor.clone() for name, tensor in learner.replicated.items()}
    learner.act(torch.randn(task.num_envs, task.actor_size))
    learner.policy()(torch.randn(5, task.actor_size))
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.replicated.items())
    assert not torch.equal(before["target_critic/batch_norm"], before["critic/batch_norm"])


def test_actions_are_uniform_until_learning_begins_and_within_the_limits():
    task = dataclasses.replace(spec(), num_envs=4000)
    learner = build(config(), task)
    actions = learner.act(torch.randn(task.num_envs, task.actor_size))
    low, high = torch.tensor(task.action_low), torch.tensor(task.action_high)
    assert ((actions >= low) & (actions <= high)).all()
    torch.testing.assert_close(actions.mean(0), (low + high) / 2, atol=0.06, rtol=0)
    torch.testing.assert_close(actions.var(0), (high - low) ** 2 / 12, atol=0.06, rtol=0.05)


def test_bf16_stays_close_to_float32():
    task = spec()
    exact, rough = trained(config(), task, 3), trained(config(), task, 3, precision="bf16-mixed")
    assert not torch.equal(exact.critic_flat.values, rough.critic_flat.values)
    torch.testing.assert_close(exact.critic_flat.values, rough.critic_flat.values, atol=2e-2, rtol=0)


def test_symmetry_needs_a_task_that_has_mirrors():
    trained(config(symmetry=True), spec(mirrors=mirrors()), 2)
    with pytest.raises(UserErrors, match="task small has no mirror images; allowed: false"):
        build(config(symmetry=True), spec())


# parts


def test_the_member_with_the_smaller_mean_gives_its_whole_distribution():
    low_mean, high_mean = torch.tensor([[4.0, 0.0, 0.0]]), torch.tensor([[0.0, 0.0, 4.0]])
    chosen, value = least_optimistic([torch.cat([low_mean, high_mean]), torch.cat([high_mean, high_mean])], -1.0, 1.0)
    torch.testing.assert_close(chosen, torch.cat([low_mean, high_mean]).softmax(-1))
    expected = (math.exp(4) - 1) / (math.exp(4) + 2)
    torch.testing.assert_close(value, torch.tensor([-expected, expected]))


def test_the_learning_rate_falls_like_half_a_cosine_and_stays():
    def rate(step, warm_up=0):
        return float(cosine_rate(torch.tensor(float(step)), 3e-4, 1.5e-4, warm_up, 100))

    assert [rate(step) for step in (0, 50, 100, 500)] == pytest.approx([3e-4, 2.25e-4, 1.5e-4, 1.5e-4])
    assert rate(0, warm_up=10) == pytest.approx(0.3e-4)
    assert rate(9, warm_up=10) == pytest.approx(rate(9))


def test_the_target_entropy_is_that_of_the_target_std():
    assert entropy_of_std(29, 0.15) == pytest.approx(-13.87, abs=0.01)
    assert entropy_of_std(12, 0.15) == pytest.approx(-5.74, abs=0.01)


def test_noise_is_held_for_as_long_as_it_was_drawn_for_and_mostly_short():
    noise = HeldNoise(3, 2, exponent=2.0, longest=16, generator=torch.Generator().manual_seed(5))
    rows = [noise.next().clone() for _ in range(40_000)]
    changes = [tick for tick in range(1, len(rows)) if not torch.equal(rows[tick], rows[tick - 1])]
    held = torch.tensor([b - a for a, b in zip([0, *changes], changes, strict=False)])
    assert held.min() == 1
    assert held.max() == 16
    assert (held == 1).float().mean().item() == pytest.approx(0.631, abs=0.02)
    assert (held == 2).float().mean().item() == pytest.approx(0.158, abs=0.02)
    assert held.float().mean().item() == pytest.approx(2.13, abs=0.08)
    drawn = torch.stack([rows[tick] for tick in changes])
    assert drawn.std().item() == pytest.approx(1.0, abs=0.02)


def test_rewards_of_any_size_are_scaled_to_the_same():
    def scale(factor):
        rewards = RewardScale(4, 0.9, 5.0, Ranks(), CPU)
        for reward, ended in ticks(dataclasses.replace(spec(), num_envs=4), 30):
            rewards.observe(factor * reward, ended)
        rewards.merge()
        return float(rewards.scale()) / factor

    assert scale(100.0) == pytest.approx(scale(1.0), rel=1e-5)
    assert scale(0.01) == pytest.approx(scale(1.0), rel=1e-3)  # 1e-8 under the root


def test_a_last_reward_opens_the_next_sum():
    rewards = RewardScale(2, 0.5, 1.0, Ranks(), CPU)
    rewards.observe(torch.tensor([1.0, 1.0]), torch.tensor([], dtype=torch.long))
    rewards.observe(torch.tensor([1.0, 1.0]), torch.tensor([1]))
    assert rewards.local()["reward/sums"].tolist() == [1.5, 1.0]
    rewards.merge()
    count, mean, variance, largest = rewards.replicated()["reward/statistics"].tolist()
    assert (count, mean, largest) == (4, 1.125, 1.5)
    assert variance == pytest.approx(torch.tensor([1.0, 1.0, 1.5, 1.0]).var(unbiased=False).item())


def test_groups_are_merged_as_if_they_had_been_one():
    values = torch.randn(60, dtype=torch.float64) * 3 + 5
    groups = [values[:7], values[7:40], values[40:]]
    rows = [
        torch.stack([torch.tensor(float(len(g))).double(), g.mean(), g.var(unbiased=False), g.abs().max()])
        for g in groups
    ]
    empty = torch.zeros(4, dtype=torch.float64)
    whole = merged(torch.stack([empty, *rows]))
    expected = torch.stack([torch.tensor(60.0).double(), values.mean(), values.var(unbiased=False), values.abs().max()])
    torch.testing.assert_close(whole, expected)


def test_rms_norm_has_mean_square_one_and_batch_norm_follows_slowly():
    net = FlashNet(2, 5, 8, 1, 3)
    x = 3 + 2 * torch.randn(64, 5)
    room = torch.zeros(3, net.channels)
    before = net(x)
    net(x, batch=room)
    net.follow(room, 64, torch.tensor(True))
    torch.testing.assert_close(net.running[0, :5], 0.01 * x.mean(0))
    torch.testing.assert_close(net.running[1, :5], 0.99 + 0.01 * x.var(0), atol=1e-4, rtol=1e-4)
    kept = net.running.clone()
    net.follow(torch.full_like(room, torch.nan), 64, torch.tensor(False))
    assert torch.equal(net.running, kept)
    assert not torch.equal(net(x)[0], before[0])
    output = UnitRMSNorm(1, 8)(0, torch.randn(10, 8))
    torch.testing.assert_close(output.square().mean(-1), torch.ones(10), atol=1e-4, rtol=0)


# several ranks


def state_after(ranks, settings, task, seeds, poison=None):
    learner = build(settings, task, seed=1, ranks=ranks)
    for index, seed in enumerate(seeds):
        if index % settings.updates_per_tick == 0:
            for reward, ended in ticks(task, 1, seed=seed):
                learner.observe(reward, ended)
        transitions = batch(task, seed=seed)
        if poison == (ranks.rank, index):
            transitions.critic[3] = torch.nan
        learner.update(transitions, index)
    return {name: tensor.clone() for name, tensor in learner.replicated.items()}


def assert_equal_bits(states):
    for other in states[1:]:
        assert [name for name in other if not torch.equal(states[0][name], other[name])] == []


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_stay_bitwise_equal_over_100_updates(world_size):
    own = [[1000 * rank + index for index in range(100)] for rank in range(world_size)]
    states = run_ranks(state_after, [(config(), spec(), seeds) for seeds in own])
    assert_equal_bits(states)
    assert states[0]["updates"].item() == 100
    assert states[0]["reward/statistics"][0].item() == 50 * world_size * spec().num_envs
    assert states[0]["actor/batch_norm"].isfinite().all()


def test_running_statistics_are_those_of_the_joined_batch():
    net = FlashNet(1, 4, 8, 1, 2)
    x = torch.randn(40, 4) * torch.tensor([1.0, 5.0, 0.1, 2.0]) + torch.tensor([0.0, 9.0, -3.0, 1.0])
    rooms = torch.stack([torch.zeros(3, net.channels) for _ in range(2)])
    for room, half in zip(rooms, x.split(20), strict=True):
        net(half, batch=room)
    net.follow(rooms.mean(0), 40, torch.tensor(True))
    torch.testing.assert_close(net.running[0, :4], 0.01 * x.mean(0))
    torch.testing.assert_close(net.running[1, :4], 0.99 + 0.01 * x.var(0), atol=1e-5, rtol=1e-5)


def test_a_value_that_is_not_finite_on_one_rank_skips_the_step_on_both():
    own = [[100 * rank + index for index in range(4)] for rank in range(2)]
    states = run_ranks(state_after, [(config(actor_every=2), spec(), seeds, (1, 3)) for seeds in own])
    assert_equal_bits(states)
    assert states[0]["skipped_updates"].item() == 1
    assert all(tensor.isfinite().all() for tensor in states[0].values())
    before = run_ranks(state_after, [(config(actor_every=2), spec(), seeds[:3]) for seeds in own])
    for name in ("target_critic", "critic/batch_norm", "target_critic/batch_norm", "critic/exp_avg", "critic/step"):
        assert torch.equal(states[0][name], before[0][name])
    torch.testing.assert_close(states[0]["critic"], before[0]["critic"], atol=1e-6, rtol=0)  # projected once more


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("trains", [False, True])
def test_all_members_at_once_compute_what_they_do_one_by_one(trains, bf16):
    """The way of an accelerator against the CPU's: outputs, gradients and the statistics they leave."""
    torch.manual_seed(0)
    net = FlashNet(3, 5, 16, 2, 7)
    net.running.copy_(torch.rand_like(net.running) + 0.5)
    x = torch.randn(64, 5, requires_grad=True)
    found = []
    for forward in (net.forward, net.batched):
        batch = torch.zeros(3, net.channels) if trains else None
        net.zero_grad(), setattr(x, "grad", None)
        outputs = forward(x, Arithmetic(torch.bfloat16 if bf16 else torch.float32), batch=batch)
        torch.stack(list(outputs)).square().sum().backward()
        found.append([*outputs, x.grad, *(p.grad for p in net.parameters()), *([batch] if trains else [])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.1 if bf16 else 1e-4, atol=0.3 if bf16 else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("trains", [False, True])
def test_the_kernels_compute_what_pytorch_does(trains, dtype):
    torch.manual_seed(0)
    kernels = load_kernels(dtype)
    if kernels is None:
        pytest.skip("no C compiler")
    net = FlashNet(2, 5, 16, 2, 7)
    net.running.copy_(torch.rand_like(net.running) + 0.5)
    x = torch.randn(300, 5, requires_grad=True)
    found = []
    for arithmetic in (Arithmetic(dtype), Arithmetic(dtype, kernels)):
        batch = torch.zeros(3, net.channels) if trains else None
        net.zero_grad(), setattr(x, "grad", None)
        outputs = net(x, arithmetic, batch=batch)
        torch.stack(list(outputs)).square().sum().backward()
        found.append([*outputs, x.grad, *(p.grad for p in net.parameters()), *([batch] if trains else [])])
    for one, other in zip(*found, strict=True):
        scale = float(one.detach().abs().max())
        assert float((one - other).detach().abs().max()) < (0.03 if dtype == torch.bfloat16 else 1e-5) * scale


def test_values_that_are_not_finite_pass_through_the_kernels():
    kernels = load_kernels(torch.float32)
    if kernels is None:
        pytest.skip("no C compiler")
    x = torch.tensor([[float("nan"), 1.0], [2.0, 3.0]])
    out = kernels.norm_relu(x, torch.ones(2), torch.zeros(2), None)
    assert out.isnan().tolist() == [[True, False], [False, False]]
    mean, variance = kernels.column_moments(x)
    assert mean.isnan().tolist() == variance.isnan().tolist() == [True, False]
