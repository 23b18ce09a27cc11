import math

import pytest
import torch

from tests.learners.problems import CPU
from unilab_fabric.learners.actor import LOG_STD_MAX, LOG_STD_MIN, Actor
from unilab_fabric.learners.operations import TorchOperations

PLAIN = TorchOperations(CPU, bf16=False)


def actor(normalise=False):
    torch.manual_seed(0)
    return Actor(4, (32, 16), (-1.0, 0.0), (1.0, 4.0), normalise)


def test_a_fresh_policy_is_the_middle_of_the_action_range_with_std_0_0821_in_every_state():
    observation = torch.randn(10, 4)
    action, _, std = actor().sample(PLAIN, observation, torch.zeros(10, 2))
    torch.testing.assert_close(std, torch.full((10, 2), 0.0821), atol=1e-4, rtol=0.0)
    assert torch.equal(action, torch.tensor([[0.0, 2.0]]).expand(10, 2))
    assert torch.equal(actor()(observation), action)


def test_log_density_of_the_fresh_mean_by_hand():
    _, log_prob, _ = actor().sample(PLAIN, torch.randn(1, 4), torch.zeros(1, 2))
    # n (2.5 - log(2 pi) / 2) - sum of log scale, scale 1 and 2
    assert log_prob.item() == pytest.approx(2 * (2.5 - 0.918939) - math.log(2.0), abs=1e-5)


def test_the_density_is_that_of_the_action_in_its_own_units():
    policy = actor()
    observation = torch.randn(1, 4).expand(20_000, 4)
    policy.net.head.bias.data[0, 3] = 1.0  # a wider second action
    noise = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(0))
    action, log_prob, _ = policy.sample(PLAIN, observation, noise)
    # E[1 / p(a)] is the volume of the actions that were sampled from: check the density of a small cell by counting
    cell = ((action - torch.tensor([0.0, 2.0])).abs() < torch.tensor([0.02, 0.05])).all(-1)
    assert log_prob[cell].exp().mean().item() == pytest.approx(cell.sum().item() / 20_000 / (0.04 * 0.1), rel=0.1)


def test_actions_stay_within_their_limits():
    policy = actor()
    policy.net.head.bias.data.fill_(20.0)
    action, _, _ = policy.sample(PLAIN, torch.randn(100, 4), 100.0 * torch.randn(100, 2))
    assert (action >= torch.tensor([-1.0, 0.0])).all()
    assert (action <= torch.tensor([1.0, 4.0])).all()


def test_log_std_stays_between_its_limits():
    policy = actor()
    policy.net.head.weight.data.normal_(std=100.0)
    _, _, std = policy.sample(PLAIN, torch.randn(100, 4), torch.zeros(100, 2))
    assert std.min().item() >= math.exp(LOG_STD_MIN) * 0.999
    assert std.max().item() <= math.exp(LOG_STD_MAX)


def test_the_normaliser_is_part_of_the_policy():
    policy = actor(normalise=True)
    policy.net.head.weight.data.normal_()
    observation = torch.randn(6, 4)
    before = policy(observation)
    policy.normaliser.merge(torch.tensor([[[5.0] * 4, [9.0] * 4]]), 100, torch.tensor(True))
    after = policy(5.0 + 3.01 * observation / 1.01)
    torch.testing.assert_close(after, before)
    assert "normaliser.mean" in policy.state_dict()
