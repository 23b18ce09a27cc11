"""How a tick gets from a slot to the learner's device, and the actions back.

On the CPU the slots are the learner's memory. On CUDA they are registered, so that a copy is asynchronous: the first
part of a slot (action, observations, reward, flags) travels as one block on a stream of its own, while the main stream
still runs the updates of the tick before, and the main stream waits for it by an event.

Nothing here guards a slot against its next user, since the hand-over does: the collector may write slot t only once
action t + 1 was released, and that is after the host has read action t + 1, which the device computes after it has
read slot t.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unilab_fabric.loop.slots import HEAD, Slot
from unilab_fabric.parallel.reduce import Ranks


@dataclass(frozen=True, kw_only=True)
class Handover:
    """What a slot holds, on the learner's device; N environments, K of whose episodes have ended."""

    action: Tensor  # (N, actions), transition t - 1, in the environment's units
    actor: Tensor  # (N, actor observation), observation t
    critic: Tensor  # (N, critic observation), observation t
    reward: Tensor  # (N,), transition t - 1
    terminated: Tensor  # (N,) bool, transition t - 1
    ended_env: Tensor  # (K,) int64
    final_actor: Tensor  # (K, actor observation), the true last ones of those episodes
    final_critic: Tensor  # (K, critic observation)


class Transfer(Protocol):
    """The way between the slots of a rank and its device."""

    def take(self, slot: Slot) -> Handover:
        """What the slot holds, ordered before what the device is given next."""
        ...

    def give(self, action: Tensor, slot: Slot) -> None:
        """Writes actions (N, actions) into a slot; returns once they are there."""
        ...

    def close(self) -> None:
        """Lets go of the slots."""
        ...


class SharedTransfer:
    """For a learner on the CPU: nothing travels."""

    def take(self, slot: Slot) -> Handover:
        """Views of the slot, valid until its next release."""
        ended = int(slot.ended[0])
        return Handover(
            action=torch.from_numpy(slot.action),
            actor=torch.from_numpy(slot.actor),
            critic=torch.from_numpy(slot.critic),
            reward=torch.from_numpy(slot.reward),
            terminated=torch.from_numpy(slot.terminated),
            ended_env=torch.from_numpy(slot.ended_env[:ended]),
            final_actor=torch.from_numpy(slot.final_actor[:ended]),
            final_critic=torch.from_numpy(slot.final_critic[:ended]),
        )

    def give(self, action: Tensor, slot: Slot) -> None:
        """See Transfer."""
        torch.from_numpy(slot.action).copy_(action)

    def close(self) -> None:
        """Does nothing."""


class Copies(Protocol):
    """What the device has to do with copies: CUDA's, or a stand-in of tests."""

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """Makes copies from and to this memory asynchronous. Raises RuntimeError."""
        ...

    def unpin(self) -> None:
        """Undoes `pin`; before the memory goes."""
        ...

    def aside(self, copy: Callable[[], None]) -> None:
        """Runs `copy` on the copying stream; the main stream's next work waits for it."""
        ...

    def mark(self) -> Callable[[], bool]:
        """A question whether all that the main stream was given up to now is done."""
        ...


class CopiedTransfer:
    """For a learner on another device: each slot has a twin there."""

    def __init__(self, slots: Sequence[Slot], device: torch.device, copies: Copies, ranks: Ranks) -> None:
        """`slots` lie one behind the other in the same memory."""
        self._copies = copies
        self._ranks = ranks
        start = np.frombuffer(slots[0].memory, np.uint8)
        whole = np.lib.stride_tricks.as_strided(start, (sum(slot.memory.nbytes for slot in slots),), (1,))
        copies.pin(whole)
        self._twins = {id(slot.memory): _Twin(slot, device) for slot in slots}

    def take(self, slot: Slot) -> Handover:
        """The slot's twin, valid until the slot after the next is taken."""
        twin = self._twins[id(slot.memory)]
        ended = int(slot.ended[0])
        self._copies.aside(lambda: twin.copy(ended))
        return twin.handover(ended)

    def give(self, action: Tensor, slot: Slot) -> None:
        """See Transfer. Raises PeerStalled where the device waits for a rank that does not come."""
        self._twins[id(slot.memory)].host["action"].copy_(action, non_blocking=True)
        self._ranks.wait_for_device(self._copies.mark(), "the actions")

    def close(self) -> None:
        """Unregisters the memory."""
        self._copies.unpin()


class CudaCopies:
    """Pinned memory, a second stream and events."""

    def __init__(self, device: torch.device) -> None:
        self._aside = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        self._pinned = 0

    def pin(self, memory: NDArray[np.uint8]) -> None:
        """See Copies."""
        self._pinned = memory.ctypes.data
        self._call("cudaHostRegister", self._pinned, memory.nbytes, 0)

    def unpin(self) -> None:
        """See Copies."""
        self._call("cudaHostUnregister", self._pinned)

    def aside(self, copy: Callable[[], None]) -> None:
        """See Copies."""
        with torch.cuda.stream(self._aside):
            copy()
        torch.cuda.current_stream().wait_stream(self._aside)

    def mark(self) -> Callable[[], bool]:
        """See Copies."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        query: Callable[[], bool] = event.query
        return query

    def _call(self, name: str, *arguments: int) -> None:
        code = getattr(self._runtime, name)(*arguments)
        if int(code) != 0:
            raise RuntimeError(f"{name} of the slots failed: {self._runtime.cudaGetErrorString(code)}")


def choose_transfer(slots: Sequence[Slot], device: torch.device, ranks: Ranks) -> Transfer:
    """The way for a learner on this device."""
    if device.type == "cpu":
        return SharedTransfer()
    return CopiedTransfer(slots, device, CudaCopies(device), ranks)


class _Twin:
    """A slot's fields on the host, and their images on the device."""

    def __init__(self, slot: Slot, device: torch.device) -> None:
        memory = torch.frombuffer(slot.memory, dtype=torch.uint8)
        fields = {name: getattr(slot, name) for name in (*HEAD, "ended_env", "final_actor", "final_critic")}
        self.host = {name: torch.from_numpy(field) for name, field in fields.items()}
        base = memory.data_ptr()
        last = self.host[HEAD[-1]]
        end = last.data_ptr() - base + last.nbytes
        self._host_head = memory[:end]
        self._head = torch.zeros(end, dtype=torch.uint8, device=device)
        self._device: dict[str, Tensor] = {}
        for name in HEAD:
            field = self.host[name]
            part = self._head[field.data_ptr() - base :][: field.nbytes]
            self._device[name] = part.view(field.dtype).view(field.shape)
        for name in fields.keys() - set(HEAD):
            self._device[name] = torch.zeros_like(self.host[name], device=device)

    def copy(self, ended: int) -> None:
        """Brings the images up to date, the rows of `ended` episodes included."""
        self._head.copy_(self._host_head, non_blocking=True)
        if ended:
            for name in ("ended_env", "final_actor", "final_critic"):
                self._device[name][:ended].copy_(self.host[name][:ended], non_blocking=True)

    def handover(self, ended: int) -> Handover:
        """The images."""
        rows = {name: self._device[name][:ended] for name in ("ended_env", "final_actor", "final_critic")}
        return Handover(**{name: self._device[name] for name in HEAD}, **rows)
