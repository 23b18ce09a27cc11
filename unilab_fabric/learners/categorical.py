"""Distributions of the return on K atoms evenly spaced on [low, high]; Bellemare, Dabney and Munos 2017 (C51)."""

import torch
from torch import Tensor


def expected_value(logits: Tensor, low: float, high: float) -> Tensor:
    """Mean of softmax(logits): (B, K) -> (B,)."""
    return logits.softmax(-1) @ _atoms(logits, low, high)


def project(probabilities: Tensor, soft_reward: Tensor, bootstrap: Tensor, low: float, high: float) -> Tensor:
    """Moves each atom z to clip(soft_reward + bootstrap z) and splits its mass between its two neighbours; equation 7.

    probabilities (B, K), soft_reward and bootstrap (B,); returns (B, K).
    """
    last = probabilities.shape[-1] - 1
    atoms = _atoms(probabilities, low, high)
    moved = (soft_reward.unsqueeze(-1) + bootstrap.unsqueeze(-1) * atoms).clamp(low, high)
    position = (moved - low) * (last / (high - low))
    lower = position.long().clamp(0, last)  # a position that is not a number must not become an index
    share = position - lower
    projected = torch.zeros_like(probabilities)
    projected.scatter_add_(-1, lower, probabilities * (1.0 - share))
    projected.scatter_add_(-1, (lower + 1).clamp(max=last), probabilities * share)
    return projected


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Mean over rows of the cross-entropy of softmax(logits) against the target, (B, K) both."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean()


def _atoms(like: Tensor, low: float, high: float) -> Tensor:
    return torch.linspace(low, high, like.shape[-1], dtype=like.dtype, device=like.device)
