"""The ranks agree on the tick after which they stop, without waiting for each other."""

import torch
from torch import Tensor

from unilab_fabric.parallel.reduce import Pending, Ranks


class StopVote:
    """Every rank casts a code in each tick and reads the largest of all in the next one, when it has long arrived."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        self._largest: Tensor = torch.zeros(1, dtype=torch.int64, device=device)
        self._outcome = self._largest  # where the host reads it
        if device.type == "cuda":  # an asynchronous copy: reading from the device would wait for the updates behind it
            self._outcome = torch.zeros(1, dtype=torch.int64, pin_memory=True)
        self._pending: Pending | None = None
        self._copied: torch.cuda.Event | None = None

    def exchange(self, code: int) -> int:
        """Casts this rank's code for now; returns the largest code of the exchange before, the same on every rank.

        Alone, that is the code itself. Codes are 0 for going on, 1 or more for stopping.
        """
        if self._ranks.world_size == 1:
            return code
        outcome = self.close()
        self._largest.fill_(code)
        self._pending = self._ranks.start_max(self._largest, "stop vote")
        if self._outcome is not self._largest:
            self._pending.wait()
            self._outcome.copy_(self._largest, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        return outcome

    def close(self) -> int:
        """Ends an exchange under way and returns its outcome."""
        if self._pending is None:
            return 0
        self._pending.wait()
        self._pending = None
        if self._copied is not None:
            self._ranks.wait_for_device(self._copied.query, "the stop vote")
        return int(self._outcome.item())
