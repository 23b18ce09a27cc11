import pytest
import torch

from unilab_fabric.learners.fast_sac.losses import actor_loss
from unilab_fabric.learners.soft import soft_bellman, temperature_gradient


def test_the_soft_bellman_operator_by_hand():
    reward = torch.tensor([0.5, 0.5])
    terminated = torch.tensor([False, True])  # a time-out is not a termination: the first row may be one
    discount = torch.tensor([0.5, 0.5])
    soft_reward, bootstrap = soft_bellman(reward, terminated, discount, torch.tensor([-4.0, -4.0]), torch.tensor(0.1))
    # 0.5 + 0.5 * 0.1 * 4; a termination leaves only the reward
    torch.testing.assert_close(soft_reward, torch.tensor([0.7, 0.5]))
    assert bootstrap.tolist() == [0.5, 0.0]


def test_the_actor_loss_takes_the_mean_over_critics():
    log_prob = torch.tensor([1.0, 3.0])
    values = [torch.tensor([1.0, 2.0]), torch.tensor([5.0, 8.0])]
    # row 0: 0.1 * 1 - 3, row 1: 0.1 * 3 - 5
    assert actor_loss(log_prob, values, torch.tensor(0.1)).item() == pytest.approx((0.1 - 3 + 0.3 - 5) / 2)


def test_the_temperature_gradient_is_that_of_the_objective():
    log_temperature = torch.tensor(-1.0, requires_grad=True)
    log_prob = torch.tensor([0.5, -2.0, 3.0])
    (-log_temperature.exp() * (log_prob - 1.5)).mean().backward()
    actual = temperature_gradient(log_prob, log_temperature.detach().exp(), -1.5)
    torch.testing.assert_close(actual, log_temperature.grad)


@pytest.mark.parametrize(("entropy", "rises"), [(-2.0, True), (-0.5, False)])
def test_the_temperature_rises_exactly_when_entropy_is_below_its_target(entropy, rises):
    gradient = temperature_gradient(torch.full((4,), -entropy), torch.tensor(0.1), target_entropy=-1.0)
    assert (gradient.item() < 0) is rises
