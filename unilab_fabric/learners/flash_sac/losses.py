"""The objectives of FlashSAC as pure functions; B is the batch."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unilab_fabric.learners import categorical


def least_optimistic(logits: Sequence[Tensor], low: float, high: float) -> tuple[Tensor, Tensor]:
    """Row by row the whole distribution of the member whose mean is the least, and that mean: (B, K), (B,).

    Clipped double Q (Fujimoto et al. 2018, section 4.2) with distributions; logits (B, K) of each member.
    """
    values = torch.stack([categorical.expected_value(own, low, high) for own in logits])  # (members, B)
    value, member = values.min(0)
    stacked = torch.stack(list(logits))  # (members, B, K)
    chosen = stacked.gather(0, member.view(1, -1, 1).expand(1, -1, stacked.shape[-1])).squeeze(0)
    return chosen.softmax(-1), value


def critic_loss(logits: Sequence[Tensor], target: Tensor) -> Tensor:
    """Mean over members and rows of the cross-entropy against one common target, (B, K) each."""
    return torch.stack([categorical.cross_entropy(own, target) for own in logits]).mean()


def actor_loss(log_prob: Tensor, value: Tensor, temperature: Tensor) -> Tensor:
    """mean(a log pi(a|o) - min Q), (B,) both and a scalar; Haarnoja et al. 2018, equation 7."""
    return (temperature * log_prob - value).mean()


def entropy_of_std(actions: int, std: float) -> float:
    """Entropy [nats] of a Gaussian of so many independent actions with this standard deviation."""
    return 0.5 * actions * math.log(2.0 * math.pi * math.e * std**2)


def cosine_rate(step: Tensor, start: float, final: float, warm_up: int, horizon: int) -> Tensor:
    """Learning rate at `step`, a scalar tensor: linear from 0 over `warm_up`, then half a cosine down to `final`."""
    progress = (step / horizon).clamp(max=1.0)
    rate = final + (start - final) * 0.5 * (1.0 + torch.cos(math.pi * progress))
    return rate * ((step + 1) / warm_up).clamp(max=1.0) if warm_up else rate
