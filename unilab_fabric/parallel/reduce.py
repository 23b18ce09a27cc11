"""The mean and the sum over ranks; alone, each does nothing."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


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
        dist.all_reduce(buffer)

    def broadcast_(self, buffer: Tensor) -> None:
        """Replaces a contiguous buffer by rank 0's."""
        if self.world_size > 1:
            dist.broadcast(buffer, src=0)

    def gather(self, row: Tensor) -> Tensor:
        """Stacks one contiguous tensor of every rank: (world_size, *row.shape)."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        dist.all_gather(rows, row)
        return torch.stack(rows)

    def barrier(self) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            dist.barrier()
