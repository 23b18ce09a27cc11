"""What a rank does in some of its ticks, operation by operation, for Perfetto or TensorBoard."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from unilab_fabric.parallel.reduce import Ranks

FOLDER = "profile"
_SETTLING = 10
"""Steps with updates before a trace begins: kernels are compiled, graphs recorded, caches warm by then."""


class TickProfile:
    """Traces one rank for some ticks, once its updates go on; names the phases of every tick to NVIDIA's tools."""

    def __init__(self, ticks: int, folder: Path, ranks: Ranks, device: torch.device) -> None:
        """`ticks` may be 0, for no trace; `folder` is the run's."""
        self._ticks_left = ticks
        self._file = folder / FOLDER / f"rank-{ranks.rank}.pt.trace.json"
        self._ranks = ranks
        self._on_cuda = device.type == "cuda"
        self._settling = _SETTLING
        self._profile: profile | None = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A range of this name in the trace, and on CUDA in that of NVIDIA's tools, which costs next to nothing."""
        if self._on_cuda:
            torch.cuda.nvtx.range_push(name)  # type: ignore[no-untyped-call]
        try:
            if self._profile is None:
                yield
            else:
                with record_function(name):
                    yield
        finally:
            if self._on_cuda:
                torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    def after_step(self, ticks: int, updates: int) -> None:
        """Counts a step of so many ticks, with so many updates; begins or ends the trace between two steps."""
        if self._profile is not None:
            self._ticks_left -= ticks
            if self._ticks_left <= 0:
                self._write()
        elif self._ticks_left > 0 and updates > 0:
            self._settling -= ticks
            if self._settling <= 0:
                self._begin()

    def close(self) -> None:
        """Writes what has been traced of a run that ends before the last of the ticks, or says that nothing was."""
        if self._profile is not None:
            self._write()
        elif self._ticks_left > 0 and self._ranks.rank == 0:
            print("warning: the run was too short for a profile: its updates had not settled", file=sys.stderr)

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        self._profile = profile(activities=kinds)
        self._profile.start()

    def _write(self) -> None:
        traced, self._profile, self._ticks_left = self._profile, None, 0
        assert traced is not None
        with self._ranks.doing("writing its profile", "pauses"):
            traced.stop()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            traced.export_chrome_trace(str(self._file))
        if self._ranks.rank == 0:
            print(f"profile: {self._file.parent}, for Perfetto or TensorBoard", file=sys.stderr, flush=True)
