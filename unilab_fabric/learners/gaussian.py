"""A Gaussian squashed by tanh; n is the number of actions."""

import math

from torch import Tensor
from torch.nn import functional


def squash(head: Tensor, noise: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
    """tanh(u), its log-density and std for u = mean + std * noise, noise standard normal: (B, n), (B,), (B, n).

    head (B, 2 n) holds means and raw log stds; tanh maps the latter to [low, high].
    """
    mean, raw = head.chunk(2, dim=-1)
    log_std = low + 0.5 * (high - low) * (raw.tanh() + 1.0)
    std = log_std.exp()
    before_tanh = mean + std * noise
    return before_tanh.tanh(), squashed_log_prob(noise, log_std, before_tanh), std


def squashed_log_prob(noise: Tensor, log_std: Tensor, before_tanh: Tensor) -> Tensor:
    """Log-density of tanh(u), u = mean + std * noise; all (B, n), returns (B,).

    Haarnoja et al. 2018, appendix C, with log(1 - tanh(u)^2) = 2 (log 2 - u - softplus(-2u)), which stays exact where
    tanh saturates.
    """
    gaussian = -0.5 * noise.square() - log_std - 0.5 * math.log(2.0 * math.pi)
    change = 2.0 * (math.log(2.0) - before_tanh - functional.softplus(-2.0 * before_tanh))
    return (gaussian - change).sum(-1)
