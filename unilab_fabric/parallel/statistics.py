"""Running mean and variance of observations, merged exactly over ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unilab_fabric.parallel.reduce import Ranks

STD_FLOOR = 0.01  # added to the standard deviation, as holosoma does: a constant entry is not blown up


class RunningNormaliser(nn.Module):
    """Subtracts the running mean and divides by the running standard deviation + 0.01, per entry of (..., size).

    Before the first merge it changes nothing but the scale by 1 / 1.01. The statistics are float64; what normalises
    are two float32 vectors derived from them at each merge.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor
    shift: Tensor
    scale: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(size))
        self.register_buffer("scale", torch.full((size,), 1.0 / (1.0 + STD_FLOOR)))

    def forward(self, observation: Tensor) -> Tensor:
        """(..., size) -> (..., size)."""
        return (observation - self.shift) * self.scale

    def merge(self, moments: Tensor, rows: int, keep: Tensor) -> None:
        """Merges the batches of all ranks, `rows` rows each; does nothing where the bool scalar `keep` is false.

        moments is (ranks, 2, size): mean and biased variance of each rank's batch. Chan, Golub and LeVeque 1983,
        pairwise update; no sum of squares is formed, so a mean far from zero costs no precision.
        """
        means, variances = moments.double().unbind(1)
        batch_mean = means.mean(0)
        batch_variance = variances.mean(0) + means.var(0, unbiased=False)
        rows_of_all = rows * moments.shape[0]
        total = self.count + rows_of_all
        weight = rows_of_all / total
        delta = batch_mean - self.mean
        variance = self.variance.lerp(batch_variance, weight) + delta.square() * weight * (1.0 - weight)
        self.mean.copy_(torch.where(keep, self.mean + delta * weight, self.mean))
        self.variance.copy_(torch.where(keep, variance, self.variance))
        self.count.copy_(torch.where(keep, total, self.count))
        self.shift.copy_(self.mean)
        self.scale.copy_(1.0 / (self.variance.sqrt() + STD_FLOOR))

    def replicated(self, name: str) -> dict[str, Tensor]:
        """The live statistics by group name: `<name>/mean`, ..."""
        return {f"{name}/{key}": value for key, value in self.named_buffers()}


def batch_moments(rows: Tensor) -> Tensor:
    """Mean and biased variance of each entry: (B, size) -> (2, size) float32, computed in float64.

    In two passes: torch.var_mean takes one, row by row, and ten times as long on a CPU.
    """
    exact = rows.double()
    mean = exact.mean(0)
    return torch.stack([mean, (exact - mean).square_().mean(0)]).float()


class SharedMoments:
    """Moments of every rank's batch in one float32 buffer that is reduced anyway, so that they cost no collective.

    Each rank fills its own row and leaves the others at zero; the sum over ranks then holds all rows.
    """

    def __init__(self, normalisers: Sequence[RunningNormaliser], buffer: Tensor, ranks: Ranks) -> None:
        """`buffer` is what the ranks reduce, (world_size * floats_per_rank(normalisers),)."""
        self._normalisers = normalisers
        self._ranks = ranks
        rows = buffer.view(ranks.world_size, -1)
        sizes = [2 * normaliser.size for normaliser in normalisers]
        self._parts = [part.view(ranks.world_size, 2, -1) for part in torch.split(rows, sizes, dim=1)]

    @staticmethod
    def floats_per_rank(normalisers: Sequence[RunningNormaliser]) -> int:
        """Length of one rank's row."""
        return sum(2 * normaliser.size for normaliser in normalisers)

    def write(self, batches: Sequence[Tensor]) -> None:
        """Puts the moments of this rank's batches, (B, size) for each normaliser, in its row."""
        for part, batch in zip(self._parts, batches, strict=True):
            part[self._ranks.rank].copy_(batch_moments(batch))

    def merge(self, rows: int, keep: Tensor) -> None:
        """Merges what all ranks wrote, `rows` rows each, once `Ranks.mean_` has been through the buffer."""
        for part, normaliser in zip(self._parts, self._normalisers, strict=True):
            normaliser.merge(part * self._ranks.world_size, rows, keep)  # the mean divided each row by the world size
