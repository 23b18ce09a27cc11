"""Sums over the ranks of one machine in memory that all of them map, in place of a trip through gloo's sockets.

Small sums are what a learner on the CPU makes: there a collective's length is that of its hand-overs, and gloo's helper
thread needs the core that physics runs on.
"""

import ctypes
import mmap
import os
import secrets
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unilab_fabric.memory import NAME, anonymous_memory
from unilab_fabric.native import Unavailable, build

SOURCE = Path(__file__).with_name("shared.c")
FLAGS = ["-O3", "-march=native", "-fPIC"]
CAPACITY = 1 << 18
"""Floats of a slot; longer buffers go in pieces."""
_LINE = 64  # bytes, as in shared.c
_MARK_AT = 8  # bytes, behind rank 0's word, which nobody else uses
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
    size, descriptor, mark = world_size * (_LINE + 2 * 4 * CAPACITY), -1, secrets.randbits(62)
    try:
        if rank == 0 and not reason:
            try:
                descriptor = anonymous_memory(size)
                os.pwrite(descriptor, struct.pack("q", mark), _MARK_AT)
            except OSError as error:
                reason = str(error)
        rows = gather(torch.tensor([os.getpid(), descriptor, mark]), "where shared memory is")
        memory = None
        if not reason:
            pid, number, its_mark = rows[0].tolist()
            memory, reason = _mapped(pid, number, its_mark, size)
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


def _mapped(pid: int, descriptor: int, mark: int, size: int) -> tuple[mmap.mmap | None, str]:
    """Rank 0's memory, by its process and descriptor, or why it cannot be reached.

    In another container the number may be another process's: only what bears the mark is it.
    """
    path = f"/proc/{pid}/fd/{descriptor}"
    try:
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):
            return None, "rank 0 is out of sight"
        own = os.open(path, os.O_RDWR)
    except OSError as error:
        return None, f"rank 0's memory cannot be opened: {error.strerror}"
    try:
        if os.fstat(own).st_size != size or os.pread(own, 8, _MARK_AT) != struct.pack("q", mark):
            return None, "rank 0 is out of sight"
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
