"""What the ranks do together: mean, sum, broadcast, gather, barrier; alone, each does nothing.

Every call has a name, by which errors speak of it.
"""

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

    def mean_(self, buffer: Tensor, name: str) -> None:
        """Replaces a contiguous float buffer by its mean over ranks, the same bits on every rank."""
        if self.world_size == 1:
            return
        self.sum_(buffer, name)
        buffer.div_(self.world_size)

    def sum_(self, buffer: Tensor, name: str) -> None:
        """Replaces a contiguous buffer by its sum over ranks."""
        if self.world_size == 1:
            return
        if not buffer.is_contiguous():
            raise ValueError(f"a collective needs a contiguous buffer, not strides {buffer.stride()}")
        self._together(f"all_reduce of {name}", dist.all_reduce, buffer)

    def broadcast_(self, buffer: Tensor, name: str) -> None:
        """Replaces a contiguous buffer by rank 0's."""
        if self.world_size > 1:
            self._together(f"broadcast of {name}", dist.broadcast, buffer, 0)

    def gather(self, row: Tensor, name: str) -> Tensor:
        """Stacks one contiguous tensor of every rank: (world_size, *row.shape)."""
        if self.world_size == 1:
            return row.unsqueeze(0)
        rows = [torch.empty_like(row) for _ in range(self.world_size)]
        self._together(f"all_gather of {name}", dist.all_gather, rows, row)
        return torch.stack(rows)

    def barrier(self, name: str) -> None:
        """Waits for all ranks."""
        if self.world_size > 1:
            self._together(f"barrier {name}", dist.barrier)

    def _together(self, name: str, collective: Callable[..., Any], *arguments: Any) -> None:
        """Runs a collective. Raises PeerLost, naming it, where it cannot finish."""
        try:
            collective(*arguments)
        except RuntimeError as error:  # gloo and NCCL raise no narrower kind for a closed connection or a deadline
            raise PeerLost(f"rank {self.rank}: {name} could not finish: {error}") from error
