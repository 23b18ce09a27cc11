"""Running mean and variance of observations, merged exactly over ranks."""

import torch
from torch import Tensor, nn

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
    """Mean and biased variance of each entry: (B, size) -> (2, size) float32, computed in float64."""
    variance, mean = torch.var_mean(rows.double(), dim=0, unbiased=False)
    return torch.stack([mean, variance]).float()
