"""Rewards scaled by how large discounted returns have been, so that they fit a fixed range (section 5 of the facts)."""

import torch
from torch import Tensor

from unilab_fabric.parallel.reduce import Ranks


class RewardScale:
    """Running statistics of each environment's discounted sum of rewards G.

    G and what has been seen since the last merge are the rank's own; count, mean, variance and largest |G| are of all
    ranks and replicated. arXiv:2604.04539, reward scaling.
    """

    def __init__(self, num_envs: int, discount: float, max_return: float, ranks: Ranks, device: torch.device) -> None:
        self._discount = discount
        self._max_return = max_return
        self._ranks = ranks
        self._sums = torch.zeros(num_envs, device=device)
        self._fresh = torch.zeros(4, dtype=torch.float64, device=device)
        self._all = torch.zeros(4, dtype=torch.float64, device=device)

    def observe(self, reward: Tensor, ended: Tensor) -> None:
        """One tick: rewards (N,), and the environments (K,) whose episodes it ended."""
        continues = torch.ones_like(self._sums).index_fill_(0, ended, 0.0)
        self._sums.mul_(self._discount * continues).add_(reward)
        sums = self._sums.double()
        largest = sums.abs().max()
        own = torch.stack([torch.full_like(largest, sums.numel()), sums.mean(), sums.var(unbiased=False), largest])
        self._fresh.copy_(merged(torch.stack([self._fresh, own])))

    def merge(self) -> None:
        """Adds what all ranks have seen since the last merge; a collective."""
        rows = torch.zeros(self._ranks.world_size, 4, dtype=torch.float64, device=self._all.device)
        rows[self._ranks.rank] = self._fresh
        self._ranks.sum_(rows, "reward statistics")
        self._all.copy_(merged(torch.cat([self._all.unsqueeze(0), rows])))
        self._fresh.zero_()

    def scale(self) -> Tensor:
        """What rewards are divided by, a scalar tensor."""
        _, _, variance, largest = self._all.unbind()
        return torch.maximum((variance + 1e-8).sqrt(), largest / self._max_return).float()

    def replicated(self) -> dict[str, Tensor]:
        """The live statistics of all ranks."""
        return {"reward/statistics": self._all}

    def local(self) -> dict[str, Tensor]:
        """The live state of this rank."""
        return {"reward/sums": self._sums, "reward/fresh": self._fresh}


def merged(rows: Tensor) -> Tensor:
    """Count, mean, biased variance and largest magnitude of several groups together: (groups, 4) -> (4,).

    Chan, Golub and LeVeque 1983; groups without members count for nothing.
    """
    counts, means, variances, largest = rows.unbind(1)
    total = counts.sum()
    weights = counts / total.clamp_min(1.0)
    mean = (weights * means).sum()
    variance = (weights * (variances + (means - mean).square())).sum()
    return torch.stack([total, mean, variance, largest.max()])
