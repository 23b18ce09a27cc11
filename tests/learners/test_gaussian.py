import math

import pytest
import torch

from unilab_fabric.learners.gaussian import squash, squashed_log_prob


def test_the_head_holds_means_then_raw_log_stds():
    head = torch.tensor([[0.3, -0.2, 0.0, 10.0]])  # raw 0 is the middle of -5 ... 0, raw 10 the upper end
    noise = torch.tensor([[1.0, -2.0]])
    squashed, _, std = squash(head, noise, -5.0, 0.0)
    torch.testing.assert_close(std, torch.tensor([[math.exp(-2.5), 1.0]]))
    torch.testing.assert_close(squashed, torch.tensor([[0.3 + math.exp(-2.5), -0.2 - 2.0]]).tanh())


def test_the_density_of_an_action_integrates_to_one():
    mean, std = 0.3, 0.6
    action = torch.linspace(-1.0, 1.0, 20_001, dtype=torch.float64)[1:-1].unsqueeze(-1)
    before_tanh = torch.atanh(action)
    log_std = torch.full_like(action, math.log(std))
    density = squashed_log_prob((before_tanh - mean) / std, log_std, before_tanh).exp()
    assert torch.trapezoid(density, action[:, 0]).item() == pytest.approx(1.0, abs=1e-3)


def test_the_density_is_finite_and_right_where_tanh_saturates():
    before_tanh = torch.tensor([[30.0]], requires_grad=True)
    value = squashed_log_prob(torch.zeros(1, 1), torch.zeros(1, 1), before_tanh)
    # 1 - tanh(30)^2 = 4 exp(-60)
    assert value.item() == pytest.approx(-0.5 * math.log(2 * math.pi) - (math.log(4.0) - 60.0), abs=1e-4)
    value.sum().backward()
    assert before_tanh.grad.item() == pytest.approx(2.0)
