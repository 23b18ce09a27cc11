"""Are all ranks about to do the same thing? Asked before every collective, where a run is debugged.

Ranks that call different collectives wait for each other for ever, or mix up their data. Comparing first costs a
request of the rendezvous store for each call, so it is for finding such a mistake, not for training.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from unilab_fabric.errors import PeerStalled

_LOOK_S = 0.001
_OUR_FILES = frozenset({"calls.py", "reduce.py"})


class CollectiveMismatch(RuntimeError):
    """The ranks have entered different collectives; the message holds the call and the call site of each."""


class CallLog:
    """Tells the other ranks which call comes next here, and from where."""

    def __init__(self, rank: int, world_size: int, store: Store, deadline_s: float) -> None:
        """`store` reaches all ranks; a rank that does not come to its next call within `deadline_s` [s] is late."""
        self._rank = rank
        self._ranks = range(world_size)
        self._store = PrefixStore("calls", store)
        self._deadline_s = deadline_s
        self._calls = 0

    def compare(self, call: str, arguments: Sequence[Any]) -> None:
        """Waits until every rank has said what it is about to do.

        Raises CollectiveMismatch where it is not the same, PeerStalled where a rank does not come.
        """
        self._calls += 1
        own = f"{call}{_shape(arguments)}"
        keys = [f"{self._calls}/{rank}" for rank in self._ranks]
        self._store.set(keys[self._rank], f"{own} at {_call_site()}")
        self._await(keys, own)
        told = [self._store.get(key).decode() for key in keys]
        if len({text.rpartition(" at ")[0] for text in told}) > 1:
            each = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(told))
            raise CollectiveMismatch(f"the ranks differ in their collective {self._calls}: {each}")
        if self._calls > 1:  # everybody has read it, or nobody would be here
            self._store.delete_key(f"{self._calls - 1}/{self._rank}")

    def _await(self, keys: Sequence[str], own: str) -> None:
        deadline = time.monotonic() + self._deadline_s
        for rank, key in enumerate(keys):
            while not self._store.check([key]):
                if time.monotonic() > deadline:
                    raise PeerStalled(
                        rank,
                        f"rank {rank} did not come to collective {self._calls} within {self._deadline_s:.0f} s; rank "
                        f"{self._rank} is at {own} at {_call_site()}",
                    )
                time.sleep(_LOOK_S)


def _shape(arguments: Sequence[Any]) -> str:
    """Sizes and types of the tensors, which must agree too."""
    tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
    return "".join(f" {tuple(tensor.shape)} {tensor.dtype}" for tensor in tensors)


def _call_site() -> str:
    """The line that called, outside the files that make calls."""
    frame = sys._getframe(1)
    while Path(frame.f_code.co_filename).name in _OUR_FILES and frame.f_back is not None:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
