"""Sums over the ranks of one machine in memory that all of them map, in place of a trip through gloo's sockets.

Small sums are what a learner on the CPU makes: there a collective's length is that of its hand-overs, and gloo's helper
thread needs the core that physics runs on.
"""

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unilab_fabric.native import Unavailable, build

SOURCE = Path(__file__).with_name("shared.c")
FLAGS = ["-O3", "-march=native", "-fPIC"]
CAPACITY = 1 << 18
"""Floats of a slot; longer buffers go in pieces."""
_LINE = 64  # bytes, as in shared.c
_LOOK_S = 0.5


class PeerGone(RuntimeError):
    """Another rank has ended in the middle of a sum."""

    def __init__(self, rank: int, pid: int) -> None:
        super().__init__(f"rank {rank}, process {pid}, is gone")


class SharedSum:
    """One rank's hand in the sums; every rank makes the same calls in the same order."""

    def __init__(self, library: Any, memory: mmap.mmap, rank: int, pids: list[int]) -> None:
        """`open_shared_sum` makes one; `pids` are the processes of the ranks."""
        self._publish, self._collect = library.shared_publish, library.shared_collect
        self._publish.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_long] * 5]
        self._collect.argtypes = [ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_long] * 5]
        self._publish.restype, self._collect.restype = None, ctypes.c_long
        self._memory = memory  # stays mapped for as long as the address is used
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._rank = rank
        self._pids = pids
        self._call = 0

    def sum_(self, buffer: Tensor, look: Callable[[float], None]) -> None:
        """Replaces a contiguous float32 CPU tensor by its sum over ranks, the same bits on every rank.

        `look` is called twice a second with the seconds [s] waited so far; it may raise. Raises PeerGone.
        """
        since = time.monotonic()
        for start in range(0, buffer.numel(), CAPACITY):
            address, count = buffer.data_ptr() + 4 * start, min(CAPACITY, buffer.numel() - start)
            self._call += 1
            self._publish(self._address, address, count, self._rank, len(self._pids), CAPACITY, self._call)
            while (late := self._collected(address, count)) >= 0:
                if _has_ended(self._pids[late]):
                    raise PeerGone(late, self._pids[late])
                look(time.monotonic() - since)

    def _collected(self, address: int, count: int) -> int:
        late: int = self._collect(
            self._address, address, count, len(self._pids), CAPACITY, self._call, int(1e9 * _LOOK_S)
        )
        return late


def open_shared_sum(rank: int, world_size: int, gather: Callable[[Tensor, str], Tensor]) -> SharedSum | None:
    """This rank's hand in sums of all ranks, through `gather`, a collective; None on all where one of them cannot.

    That one says why.
    """
    library, reason = None, "shared memory of this kind is Linux's"
    if sys.platform == "linux":
        try:
            library, reason = ctypes.CDLL(str(build(SOURCE, FLAGS))), ""
        except (Unavailable, OSError) as error:
            reason = str(error)
    descriptor = os.memfd_create("unilab_fabric") if rank == 0 and library is not None else -1
    size = world_size * (_LINE + 2 * 4 * CAPACITY)
    try:
        if descriptor >= 0:
            os.truncate(descriptor, size)
        rows = gather(torch.tensor([os.getpid(), descriptor]), "where shared memory is")
        memory = None
        if not reason:
            memory, reason = _mapped(int(rows[0, 0]), int(rows[0, 1]), size)
        # whoever has not mapped it must not be waited for, and the descriptor stays open until all have
        able = gather(torch.tensor([memory is not None]), "who has shared memory")
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if reason:
        print(f"note: rank {rank}: gradients travel through gloo and not through memory: {reason}", file=sys.stderr)
    if library is None or memory is None or not able.all():
        return None
    return SharedSum(library, memory, rank, rows[:, 0].tolist())


def _mapped(pid: int, descriptor: int, size: int) -> tuple[mmap.mmap | None, str]:
    """Rank 0's memory, by its process and descriptor, or why it cannot be reached."""
    try:
        own = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    except OSError as error:
        return None, f"rank 0's memory cannot be opened: {error.strerror}"
    try:
        return mmap.mmap(own, size), ""
    except OSError as error:
        return None, f"rank 0's memory cannot be mapped: {error.strerror}"
    finally:
        os.close(own)


def _has_ended(pid: int) -> bool:
    """Whether a process is gone, or only waits for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True
