"""What the ranks do together: mean, sum, broadcast, gather, barrier; alone, each does nothing.

Every call has a name, by which errors and long waits speak of it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unilab_fabric.errors import PeerLost
from unilab_fabric.parallel.calls import CallLog
from unilab_fabric.parallel.flat import FlatParameters
from unilab_fabric.parallel.presence import Kind, Presence
from unilab_fabric.parallel.shared import PeerGone, SharedSum

_LOOK = timedelta(seconds=0.5)
_BUSY_LOOKS = 200
"""Looks at a device that follow each other at once; after them it is not a matter of microseconds."""
_DEVICE_LOOK_S = 50e-6


@dataclass
class Waits:
    """How long this rank has been in collectives, waiting for others included."""

    seconds: float = 0.0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Adds what happens within it; not to be nested."""
        since = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - since


@dataclass(frozen=True)
class Ranks:
    """The ranks of a job as the learner sees them.

    Uses `torch.distributed` over Fabric's process group: `fabric.all_reduce` runs a barrier first, which the update
    cycle must not. On the CPU a wait looks up twice a second; on CUDA NCCL's own watchdog ends a process that waits for
    one that is gone.
    """

    rank: int = 0
    world_size: int = 1
    presence: Presence | None = None
    """Knows where the other ranks are; without it a late one is an error after the process group's own deadline."""
    on_cuda: bool = False
    """Whether the buffers are a CUDA device's: then a call takes its place in the current stream, as a kernel does and
    as a graph can hold it, and the host does not wait for it."""
    gradient_wire: torch.dtype = torch.float32
    """What gradients travel as."""
    calls: CallLog | None = None
    """Compares the ranks' calls before each one (`training.debug_collectives`)."""
    shared: SharedSum | None = None
    """Where ranks of one machine add up float32 buffers on the CPU; without it gloo does."""
    waits: Waits = field(default_factory=Waits)
    """On CUDA it stays empty: the host waits for no collective there."""

    def mean_(self, buffer: Tensor, name: str) -> None:
        """Replaces a contiguous float buffer by its mean over ranks, the same bits on every rank."""
        if self.world_size == 1:
            return
        self.sum_(buffer, name)
        buffer.div_(self.world_size)

    def mean_gradient_(self, flat: FlatParameters, name: str) -> None:
        """Replaces a flat gradient and its tail by their means over ranks; in bf16, if wanted, only the gradient."""
        if self.world_size == 1 or self.gradient_wire == flat.gradient.dtype:
            self.mean_(flat.reduced, f"{name} gradient")
            return
        narrow = flat.gradient.to(self.gradient_wire).div_(self.world_size)  # first, as a sum may overflow
        self.sum_(narrow, f"{name} gradient")
        flat.gradient.copy_(narrow)
        self.mean_(flat.tail, f"what rides on the {name} gradient")

    def sum_(self, buffer: Tensor, name: str) -> None:
        """Replaces a contiguous buffer by its sum over ranks."""
        if self.world_size == 1:
            return
        if not buffer.is_contiguous():
            raise ValueError(f"a collective needs a contiguous buffer, not strides {buffer.stride()}")
        if self.shared is not None and buffer.dtype == torch.float32:
            self._sum_in_memory(self.shared, buffer, f"all_reduce of {name}")
        else:
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

    def start_max(self, buffer: Tensor, name: str) -> "Pending":
        """Begins to replace a contiguous buffer by its maximum over ranks; `Pending.wait` ends it."""
        return self._start(f"all_reduce of {name}", dist.all_reduce, buffer, dist.ReduceOp.MAX)

    def doing(self, what: str, kind: Kind) -> AbstractContextManager[None]:
        """Within it this rank tells the others what it does: see `Kind`."""
        return contextlib.nullcontext() if self.presence is None else self.presence.doing(what, kind)

    def _together(self, call: str, collective: Callable[..., Any], *arguments: Any) -> None:
        """Runs a collective. Raises PeerLost, naming it, where it cannot finish, PeerStalled where a rank is late."""
        self._start(call, collective, *arguments).wait()

    def _sum_in_memory(self, shared: SharedSum, buffer: Tensor, call: str) -> None:
        number = 0 if self.presence is None else self.presence.enter()
        if self.calls is not None:
            self.calls.compare(call, (buffer,))
        waited = False

        def look(waited_s: float) -> None:
            nonlocal waited
            waited = True
            if self.presence is not None:
                self.presence.judge(call, number, waited_s)

        try:
            with self.waits.counted():
                shared.sum_(buffer, look)
        except PeerGone as error:
            raise self.lost(call, error) from error
        if waited and self.presence is not None:
            self.presence.waited()

    def at(self, place: str) -> None:
        """Says where in the run this rank is, for what the others may have to say about it."""
        if self.presence is not None:
            self.presence.at(place)

    def _start(self, call: str, collective: Callable[..., Any], *arguments: Any) -> "Pending":
        number = 0 if self.presence is None else self.presence.enter()
        if self.calls is not None:
            self.calls.compare(call, arguments)
        try:
            return Pending(self, call, number, collective(*arguments, async_op=not self.on_cuda))
        except RuntimeError as error:  # gloo and NCCL raise no narrower kind
            raise self.lost(call, error) from error

    def as_one(self) -> AbstractContextManager[None]:
        """Within it all collectives count as a single one: a graph replays several, and Python calls none of them."""
        return contextlib.nullcontext() if self.presence is None else self.presence.as_one()

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """For collectives of another library, which wait for a late rank as long as the process group does.

        All ranks enter together; within it that is the stall timeout. Raises PeerLost, or PeerStalled where a rank is
        late.
        """
        if self.presence is None:
            yield
            return
        self.barrier(what)
        with self.presence.bounded(what), self.as_one():
            try:
                yield
            except RuntimeError as error:
                self.presence.judge_failed(what)
                raise self.lost(what, error) from error

    def wait_for_device(self, done: Callable[[], bool], what: str) -> None:
        """Returns once `done()`; the device may hold collectives, which then wait for other ranks.

        Nobody else would notice those that a graph replays: NCCL's watchdog does not know of them. Raises PeerStalled.
        """
        for _ in range(_BUSY_LOOKS):
            if done():
                return
        since = judged = time.monotonic()
        while not done():
            time.sleep(_DEVICE_LOOK_S)
            now = time.monotonic()
            if self.presence is not None and now - judged > _LOOK.total_seconds():
                judged = now
                self.presence.judge(f"the updates before {what}", self.presence.calls, now - since)
        if self.presence is not None:
            self.presence.waited()

    def lost(self, call: str, error: BaseException) -> PeerLost:
        """The error of a collective that cannot finish."""
        return PeerLost(f"rank {self.rank}: {call} could not finish: {error}")


class Pending:
    """A collective under way."""

    def __init__(self, ranks: Ranks, call: str, number: int, work: Any) -> None:
        """`work` is torch's; None where the stream knows its place already."""
        self._ranks = ranks
        self._call = call
        self._number = number
        self._work = work

    def wait(self) -> None:
        """Returns once the result is there, on CUDA for what the stream does next.

        Raises PeerLost, PeerStalled.
        """
        if self._work is None:
            return
        with self._ranks.waits.counted():
            if not self._wait_a_while():
                self._wait_long()

    def _wait_long(self) -> None:
        """In slices, between which signals are handled and the other ranks looked at."""
        presence, since = self._ranks.presence, time.monotonic()
        with self._ranks.doing(f"in {self._call}", "works"):
            while not self._wait_a_while():
                if presence is not None:
                    presence.judge(self._call, self._number, time.monotonic() - since)
        if presence is not None:
            presence.waited()

    def _wait_a_while(self) -> bool:
        """Whether it is done. A deadline and a closed connection raise the same RuntimeError."""
        try:
            self._work.wait(_LOOK)
        except RuntimeError as error:
            if self._work.is_completed() and not self._work.is_success():
                raise self._ranks.lost(self._call, error) from error
            return False
        return True
