"""Optimiser steps that were left out for a non-finite gradient: how many, how many in a row, and whose gradient it was.

Everything is a tensor on the device, so that counting asks nothing of the host, and the same on every rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from unilab_fabric.parallel.reduce import Ranks


@dataclass(frozen=True, kw_only=True)
class Skips:
    """The counts as plain numbers."""

    total: int
    """Steps left out since the start of the run."""
    in_row: Mapping[str, int]
    """By optimiser, the newest steps that were left out one after the other."""
    by_rank: Mapping[str, Sequence[int]]
    """By optimiser and rank, how often that rank's own gradient was not finite, since this process began."""


class SkippedSteps:
    """Counts for each optimiser; the ranks tell each other in the tail of the gradient that they reduce anyway."""

    def __init__(self, optimisers: Sequence[str], ranks: Ranks, device: torch.device) -> None:
        self._optimisers = tuple(optimisers)
        self._ranks = ranks
        self._total = torch.zeros((), dtype=torch.int64, device=device)
        self._in_row = torch.zeros(len(optimisers), dtype=torch.int64, device=device)
        self._by_rank = torch.zeros(len(optimisers), ranks.world_size, dtype=torch.int64, device=device)

    @property
    def floats(self) -> int:
        """Length of the part of a tail that carries the marks."""
        return self._ranks.world_size

    def mark(self, marks: Tensor, reduced: Tensor) -> None:
        """Before the reduction: notes in `marks` (floats,), a part of `reduced`, whether this rank's part is finite."""
        if self._ranks.world_size > 1:  # a sum is finite only if every value is: one pass, and no array of flags
            marks[self._ranks.rank] = ~reduced.sum().isfinite()

    def count(self, optimiser: str, kept: Tensor, marks: Tensor) -> None:
        """After it: counts a step, left out where the bool scalar `kept` is false."""
        index = self._optimisers.index(optimiser)
        self._total += ~kept
        self._in_row[index] = torch.where(kept, 0, self._in_row[index] + 1)
        self._by_rank[index] += marks > 0 if self._ranks.world_size > 1 else ~kept

    def read(self) -> Skips:
        """The counts, read back from the device."""
        return Skips(
            total=int(self._total),
            in_row=dict(zip(self._optimisers, self._in_row.tolist(), strict=True)),
            by_rank=dict(zip(self._optimisers, self._by_rank.tolist(), strict=True)),
        )

    def replicated(self) -> dict[str, Tensor]:
        """The live counts by group name; not those by rank, whose number may change with a resume."""
        return {
            "skipped_updates": self._total,
            "skipped_updates/in_row": self._in_row,
        }
