"""The mean and the sum over ranks; alone, each does nothing."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unilab_fabric.errors import PeerLost


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job as the learner sees them.

    Uses `torch.distributed` over Fabric's process group: `fabric.all_reduce` runs a barrier first, which the update
    cycle must not.
    """

    rank: int = 0
    world_size: int = 1

    def mean_(self, buffer: Tensor) -> None:
        """Replaces a contiguous float buffer by its mean over ranks, the same bits on every rank."""
        if self.world_size == 1:
            return
        self.sum_(buffer)
        buffer.div_(self.world_size)

    def sum_(self, buffer: Tensor) -> None:
        """Replaces a contiguous buffer by its sum over ranks."""
        if self.world_size == 1:
            return
        if not buffer.is_contiguous():
            raise ValueError(f"a collective needs a contiguous buffer, not strides {buffer.stride()}")
        self._together("all_reduce", dist.all_reduce, buffer)

    def broadcast_(self, buffer: Tensor) -> None:
        """Replaces a contiguous buffer by rank 0's."""
        if self.world_size > 1:
            self._together("broadcast", dist.broadcast, buffer, 0)

    def gather(self, row: Tensor) -> Tensor:
        """Stacks one contiguous tensor of every rank: (world_size, *row.shape)."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        self._together("all_gather", dist.all_gather, rows, row)
        return torch.stack(rows)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            self._together("barrier", dist.barrier)

    def _together(self, name: str, collective: Callable[..., Any], *arguments: Any) -> None:
        """Runs a collective. Raises PeerLost, naming it, where it cannot finish."""
        try:
            collective(*arguments)
        except RuntimeError as error:  # gloo and NCCL raise no narrower kind for a closed connection or a deadline
            raise PeerLost(f"rank {self.rank}: {name} could not finish: {error}") from error
