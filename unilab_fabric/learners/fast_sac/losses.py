"""The objectives of FastSAC as pure functions; B is the batch, M the critics, K the atoms."""

import torch
from torch import Tensor


def shifted_atoms(
    atoms: Tensor, reward: Tensor, terminated: Tensor, discount: Tensor, next_log_prob: Tensor, temperature: Tensor
) -> Tensor:
    """Where the soft Bellman operator moves each atom: r - d a log pi(a'|o') + d z_k for a bootstrapped row, (B, K).

    atoms (K,), temperature scalar, the others (B,); d is `discount`, 0 where terminated. Haarnoja et al. 2018, section
    4.1, on a distribution as in Bellemare et al. 2017, equation 7. Only `terminated` cuts the bootstrap: a time-out
    ends the episode, not the return. Clipped to the support.
    """
    bootstrap = discount * ~terminated
    soft_reward = reward - bootstrap * temperature * next_log_prob
    return (soft_reward.unsqueeze(-1) + bootstrap.unsqueeze(-1) * atoms).clamp(atoms[0], atoms[-1])


def project(probabilities: Tensor, moved: Tensor, atoms: Tensor) -> Tensor:
    """Splits the mass at each moved atom between its two neighbours on the support; Bellemare et al. 2017, equation 7.

    probabilities (M, B, K), moved (B, K) within the support, atoms (K,) evenly spaced; returns (M, B, K). Every
    critic's own distribution is projected: no minimum over critics.
    """
    last = len(atoms) - 1
    position = (moved - atoms[0]) * (last / (atoms[-1] - atoms[0]))
    lower = position.long().clamp(0, last)  # a position that is not a number must not become an index
    share = (position - lower).expand_as(probabilities)
    index = lower.expand_as(probabilities)
    projected = torch.zeros_like(probabilities)
    projected.scatter_add_(-1, index, probabilities * (1.0 - share))
    projected.scatter_add_(-1, (index + 1).clamp(max=last), probabilities * share)
    return projected


def categorical_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of each critic against its target, (M, B, K) both: summed over critics, mean over the batch."""
    return -(target * logits.log_softmax(-1)).sum(-1).mean(-1).sum()


def actor_loss(log_prob: Tensor, value: Tensor, temperature: Tensor) -> Tensor:
    """mean(a log pi(a|o) - Q), Q the mean over critics: log_prob (B,), value (M, B).

    Haarnoja et al. 2018, equation 7, with the mean in place of the minimum.
    """
    return (temperature * log_prob - value.mean(0)).mean()


def temperature_gradient(log_prob: Tensor, temperature: Tensor, target_entropy: float) -> Tensor:
    """Derivative by log a of mean(-a (log pi + target entropy)), log_prob (B,); Haarnoja et al. 2018, equation 18."""
    return -temperature * (log_prob.mean() + target_entropy)
