import math

import pytest
import torch

from unilab_fabric.learners.actor import Actor, squashed_log_prob


def actor(normalise=False):
    torch.manual_seed(0)
    return Actor(4, (32, 16), (-1.0, 0.0), (1.0, 4.0), normalise)


def test_a_fresh_policy_is_the_middle_of_the_action_range_with_std_0_0821_in_every_state():
    observation = torch.randn(10, 4)
    mean, log_std = actor().distribution(observation)
    assert mean.count_nonzero() == 0
    torch.testing.assert_close(log_std.exp(), torch.full((10, 2), 0.0821), atol=1e-4, rtol=0.0)
    assert torch.equal(actor()(observation), torch.tensor([[0.0, 2.0]]).expand(10, 2))


def test_log_density_of_the_fresh_mean_by_hand():
    _, log_prob, _ = actor().sample(torch.randn(1, 4), torch.zeros(1, 2))
    # n (2.5 - log(2 pi) / 2) - sum of log scale, scale 1 and 2
    assert log_prob.item() == pytest.approx(2 * (2.5 - 0.918939) - math.log(2.0), abs=1e-5)


def test_actions_stay_within_their_limits():
    policy = actor()
    policy.net.head.bias.data.fill_(20.0)
    action, _, _ = policy.sample(torch.randn(100, 4), 100.0 * torch.randn(100, 2))
    assert (action >= torch.tensor([-1.0, 0.0])).all()
    assert (action <= torch.tensor([1.0, 4.0])).all()


def test_the_density_of_an_action_integrates_to_one():
    scale, mean, std = torch.tensor([1.5], dtype=torch.float64), 0.3, 0.6
    action = torch.linspace(-1.5, 1.5, 20_001, dtype=torch.float64)[1:-1].unsqueeze(-1)
    before_tanh = torch.atanh(action / 1.5)
    noise = (before_tanh - mean) / std
    log_std = torch.full_like(noise, math.log(std))
    density = squashed_log_prob(noise, log_std, before_tanh, scale).exp()
    assert torch.trapezoid(density, action[:, 0]).item() == pytest.approx(1.0, abs=1e-3)


def test_the_density_is_finite_and_right_where_tanh_saturates():
    before_tanh = torch.tensor([[30.0]], requires_grad=True)
    value = squashed_log_prob(torch.zeros(1, 1), torch.zeros(1, 1), before_tanh, torch.ones(1))
    # 1 - tanh(30)^2 = 4 exp(-60)
    assert value.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - (math.log(4.0) - 60.0), abs=1e-4)
    value.sum().backward()
    assert before_tanh.grad.item() == pytest.approx(2.0)


def test_the_normaliser_is_part_of_the_policy():
    policy = actor(normalise=True)
    policy.net.head.weight.data.normal_()
    observation = torch.randn(6, 4)
    before = policy(observation)
    policy.normaliser.merge(torch.tensor([[[5.0] * 4, [9.0] * 4]]), 100, torch.tensor(True))
    after = policy(5.0 + 3.01 * observation / 1.01)
    torch.testing.assert_close(after, before)
    assert "normaliser.mean" in policy.state_dict()
