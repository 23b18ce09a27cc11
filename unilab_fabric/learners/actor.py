"""A squashed Gaussian policy."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilab_fabric.learners.mlp import Mlp
from unilab_fabric.parallel.statistics import RunningNormaliser

LOG_STD_MIN = -5.0
LOG_STD_MAX = 0.0  # before tanh; a wider Gaussian only moves mass to the limits of the action


class Actor(nn.Module):
    """Actions from actor observations, in the environment's units; n is the number of actions.

    The head starts at zero: the first policy has mean 0 (before scaling) and the same width in every state.
    """

    scale: Tensor
    offset: Tensor

    def __init__(
        self,
        observation_size: int,
        hidden: Sequence[int],
        action_low: Sequence[float],
        action_high: Sequence[float],
        normalise: bool,
    ) -> None:
        super().__init__()
        self.normaliser = RunningNormaliser(observation_size) if normalise else nn.Identity()
        self.net = Mlp(1, observation_size, hidden, 2 * len(action_low))
        nn.init.zeros_(self.net.head.weight)
        nn.init.zeros_(self.net.head.bias)
        low, high = torch.tensor(action_low), torch.tensor(action_high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("offset", (high + low) / 2)

    def forward(self, observation: Tensor) -> Tensor:
        """The deterministic action, (B, observation) -> (B, n)."""
        mean, _ = self.distribution(observation)
        return mean.tanh() * self.scale + self.offset

    def distribution(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log standard deviation of the Gaussian before tanh, (B, n) float32 each."""
        mean, raw = self.net(self.normaliser(observation))[0].float().chunk(2, dim=-1)
        return mean, LOG_STD_MIN + 0.5 * (LOG_STD_MAX - LOG_STD_MIN) * (raw.tanh() + 1.0)

    def sample(self, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reparameterised actions for standard normal `noise` (B, n), their log-density (B,), and log std (B, n)."""
        mean, log_std = self.distribution(observation)
        before_tanh = mean + log_std.exp() * noise
        action = before_tanh.tanh() * self.scale + self.offset
        return action, squashed_log_prob(noise, log_std, before_tanh, self.scale), log_std


def squashed_log_prob(noise: Tensor, log_std: Tensor, before_tanh: Tensor, scale: Tensor) -> Tensor:
    """Log-density of a = scale * tanh(u) + offset, u = mean + std * noise; all (B, n), scale (n,), returns (B,).

    Haarnoja et al. 2018, appendix C, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which stays exact where
    tanh saturates. The scale belongs to the density: entropy is in units of the environment's action.
    """
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
    squash = 2.0 * (math.log(2.0) - before_tanh - functional.softplus(-2.0 * before_tanh))
    return (gaussian - squash - scale.log()).sum(-1)
