"""Two blocks of anonymous shared memory, through which collector and learner hand over one tick.

Slot t % 2 holds what tick t starts from: observation t, and of transition t - 1 the action, the reward, the flags and
the last observations of ended episodes. The learner writes action t into the other slot and releases it; the collector
steps physics there. So neither ever writes what the other still reads.

The memory has no name: the collector makes it and sends its descriptor through the socket that also carries the
signals, one byte for each hand-over. A socket says by itself when the process at its other end is gone, so a wait ends
at once then, and otherwise at its deadline. No torch here: the collector loads this module.
"""

import json
import mmap
import socket
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from unilab_fabric.spaces import Metric, Mirror, TaskSpec

NUM_SLOTS = 2
_ALIGN = 64  # bytes; a cache line, so that no two fields share one


class Stalled(RuntimeError):
    """A wait ran past its deadline."""


class PeerGone(RuntimeError):
    """The process at the other end of the channel has ended."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """Views into one slot; N environments of the rank."""

    action: NDArray[np.float32]
    """(N, actions), transition t - 1, in the environment's units."""
    actor: NDArray[np.float32]
    """(N, actor observation), observation t."""
    critic: NDArray[np.float32]
    """(N, critic observation), observation t."""
    reward: NDArray[np.float32]
    """(N,), transition t - 1."""
    terminated: NDArray[np.bool_]
    """(N,), transition t - 1."""
    ended: NDArray[np.int64]
    """(1,), episodes that transition t - 1 ended, K."""
    ended_env: NDArray[np.int64]
    """(N,), the first K are the environments whose episodes ended."""
    final_actor: NDArray[np.float32]
    """(N, actor observation), the first K rows are the true last observations of those episodes."""
    final_critic: NDArray[np.float32]
    """(N, critic observation), likewise."""
    totals: NDArray[np.float64]
    """(metrics, 2), sum and count of this tick."""
    collector_s: NDArray[np.float64]
    """(4,), seconds [s] of each of `COLLECTOR_PHASES`; the wait is that for this tick's action."""
    stop: NDArray[np.int64]
    """(1,), number of the signal that asked the collector to end, 0 for none; the rank decides when."""
    memory: memoryview
    """All of the slot's bytes."""


HEAD = ("action", "actor", "critic", "reward", "terminated")
"""The fields that every tick fills; they lie first and one behind the other."""


def slot_fields(spec: TaskSpec) -> dict[str, tuple[tuple[int, ...], DTypeLike]]:
    """Shape and type of each field of a slot."""
    n, actor, critic = spec.num_envs, spec.actor_size, spec.critic_size
    return {
        "action": ((n, spec.action_size), np.float32),
        "actor": ((n, actor), np.float32),
        "critic": ((n, critic), np.float32),
        "reward": ((n,), np.float32),
        "terminated": ((n,), np.bool_),
        "ended": ((1,), np.int64),
        "ended_env": ((n,), np.int64),
        "final_actor": ((n, actor), np.float32),
        "final_critic": ((n, critic), np.float32),
        "totals": ((len(spec.metrics), 2), np.float64),
        "collector_s": ((4,), np.float64),
        "stop": ((1,), np.int64),
    }


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def slot_bytes(spec: TaskSpec) -> int:
    """Bytes of one slot."""
    return sum(_aligned(int(np.prod(shape)) * np.dtype(dtype).itemsize) for shape, dtype in slot_fields(spec).values())


def map_slots(descriptor: int, spec: TaskSpec) -> tuple[Slot, ...]:
    """The slots in the memory behind `descriptor`, which may be closed afterwards."""
    size = slot_bytes(spec)
    memory = memoryview(mmap.mmap(descriptor, NUM_SLOTS * size))
    slots = []
    for start in range(0, NUM_SLOTS * size, size):
        views: dict[str, Any] = {"memory": memory[start : start + size]}
        offset = start
        for name, (shape, dtype) in slot_fields(spec).items():
            views[name] = np.ndarray(shape, dtype, memory, offset)
            offset += _aligned(views[name].nbytes)
        slots.append(Slot(**views))
    return tuple(slots)


_TICK = b"t"
_MESSAGE = b"m"


class Channel:
    """One end of the socket between a learner and its collector."""

    def __init__(self, end: socket.socket, peer: str) -> None:
        self._socket = end
        self._peer = peer

    def fileno(self) -> int:
        """Descriptor of the socket."""
        return self._socket.fileno()

    def signal(self) -> None:
        """Hands a slot over. Raises PeerGone."""
        self._send(_TICK)

    def send(self, message: dict[str, Any], descriptor: int | None = None) -> None:
        """Sends a message of plain values, with an open file if given. Raises PeerGone."""
        body = json.dumps(message).encode()
        self._send(_MESSAGE + len(body).to_bytes(8, "little") + body)
        if descriptor is not None:
            socket.send_fds(self._socket, [_TICK], [descriptor])

    def receive(self, deadline_s: float | None, what: str) -> dict[str, Any] | None:
        """The next message, or None for a hand-over. Raises PeerGone, and Stalled past `deadline_s` [s]."""
        if self._read(1, deadline_s, what) == _TICK:
            return None
        size = int.from_bytes(self._read(8, deadline_s, what), "little")
        message: dict[str, Any] = json.loads(self._read(size, deadline_s, what))
        return message

    def receive_descriptor(self, deadline_s: float, what: str) -> int:
        """The open file sent behind a message."""
        self._socket.settimeout(deadline_s)
        try:
            _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)
        except TimeoutError:
            raise Stalled(f"{self._peer} did not {what} within {deadline_s:.0f} s") from None
        if not descriptors:
            raise PeerGone(f"{self._peer} ended before it could {what}")
        return descriptors[0]

    def close(self) -> None:
        """Closes this end; the other one reads the end of the stream."""
        self._socket.close()

    def _send(self, data: bytes) -> None:
        try:
            self._socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            raise PeerGone(f"{self._peer} has ended") from None

    def _read(self, size: int, deadline_s: float | None, what: str) -> bytes:
        self._socket.settimeout(deadline_s)
        data = b""
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except TimeoutError:
                raise Stalled(f"{self._peer} did not {what} within {deadline_s:.0f} s") from None
            except ConnectionResetError:
                part = b""
            if not part:
                raise PeerGone(f"{self._peer} ended before it could {what}")
            data += part
        return data


def spec_to_message(spec: TaskSpec) -> dict[str, Any]:
    """A task's specification as plain values."""
    return asdict(spec)


def spec_from_message(message: dict[str, Any]) -> TaskSpec:
    """The specification that `spec_to_message` wrote."""
    mirrors = message["mirrors"]
    return TaskSpec(
        name=message["name"],
        num_envs=message["num_envs"],
        actor_size=message["actor_size"],
        critic_size=message["critic_size"],
        action_low=tuple(message["action_low"]),
        action_high=tuple(message["action_high"]),
        metrics=tuple(Metric(**metric) for metric in message["metrics"]),
        mirrors=mirrors
        and {name: Mirror(index=tuple(m["index"]), sign=tuple(m["sign"])) for name, m in mirrors.items()},
    )
