"""Where each rank of a job is, told to the others once a second, so that a long wait can name who did not arrive.

The word goes through the rendezvous store, by a thread of each rank: a main thread that is blocked, or computes, is
still heard of; a process that is stopped, or a machine that is gone, is not. Only a rank that has waited for a while
asks the store for the others, so that a thousand ranks at work cost it a thousand small writes a second.
"""

import json
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d

from unilab_fabric.errors import PeerStalled

_BEAT_S = 1.0
_SILENT_S = 2.5
"""Seconds [s] without a beat after which a rank is taken for stopped or gone."""
_MARGIN_S = 5.0
"""Seconds [s] that a rank with a deadline of its own is given to speak first."""
_NOTICE_S = 10.0

REQUEST_TIMEOUT = timedelta(seconds=3)
"""How long a request of the store may take."""

Kind = Literal["works", "pauses", "waits"]
"""What a rank is doing: it computes; it is in something that may take long, such as a hook; or it waits for its
collector, with a deadline of its own."""


@dataclass(frozen=True)
class Position:
    """A rank's place in the run."""

    calls: int = 0
    """Collectives it has entered."""
    what: str = "starting"
    """What it is doing, in words."""
    kind: Kind = "works"


@dataclass
class _Seen:
    """What is known of another rank."""

    position: Position
    beat: int
    changed_at: float  # when its beat last changed, by our clock


class Presence:
    """Tells where this rank is, and judges the others when this one waits too long for them."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        store: Store,
        *,
        store_is_with_rank_0: bool,
        stall_timeout_s: float,
        pause_timeout_s: float,
    ) -> None:
        """`store` reaches all ranks, and is used by nobody else; it must give up on a request within seconds.

        A rank that this one has waited for longer than `stall_timeout_s` [s] is late; one that has said that it pauses
        is late after `pause_timeout_s` [s].
        """
        self._store_is_with_rank_0 = store_is_with_rank_0
        self._rank = rank
        self._others = [other for other in range(world_size) if other != rank]
        self._store = PrefixStore("presence", store)
        self._stall_timeout_s = stall_timeout_s
        self._pause_timeout_s = pause_timeout_s
        self._notice_s = min(_NOTICE_S, stall_timeout_s / 2)
        self._position = Position()
        self._beat = 0
        self._seen: dict[int, _Seen] = {}
        self._waits = threading.Event()
        self._answered_at = time.monotonic()
        self._over = threading.Event()
        self._entered_at = 0.0
        self._told_of = 0  # newest call about whose wait a line was printed
        threading.Thread(target=self._run, name="presence", daemon=True).start()

    def close(self) -> None:
        """Stops telling."""
        self._over.set()

    @contextmanager
    def doing(self, what: str, kind: Kind) -> Iterator[None]:
        """Within it this rank says that it does `what`."""
        before = self._position
        self._position = Position(before.calls, what, kind)
        try:
            yield
        finally:
            self._position = Position(self._position.calls, before.what, before.kind)

    def at(self, place: str) -> None:
        """This rank computes, at this place of the run."""
        self._position = Position(self._position.calls, place, "works")

    def enter(self) -> int:
        """This rank enters its next collective; returns the collective's number."""
        self._position = Position(self._position.calls + 1, self._position.what, self._position.kind)
        return self._position.calls

    @property
    def calls(self) -> int:
        """Collectives that this rank has entered."""
        return self._position.calls

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Enters a collective; those within it do not count."""
        number = self.enter()
        try:
            yield
        finally:
            self._position = Position(number, self._position.what, self._position.kind)

    @contextmanager
    def bounded(self, what: str) -> Iterator[None]:
        """Within it collectives that do not ask us wait for `stall_timeout_s` at most; on the CPU, as NCCL has its own
        watchdog."""
        group = dist.group.WORLD
        if group is None or dist.get_backend(group) != "gloo":
            yield
            return
        before = group._get_backend(torch.device("cpu")).options._timeout
        distributed_c10d._set_pg_timeout(timedelta(seconds=self._stall_timeout_s), group)
        self._entered_at = time.monotonic()
        try:
            yield
        finally:
            distributed_c10d._set_pg_timeout(before, group)

    def judge_failed(self, call: str) -> None:
        """After a collective has failed. Raises PeerStalled if it had waited too long and another rank is late."""
        waited_s = time.monotonic() - self._entered_at
        if waited_s < self._stall_timeout_s:
            return
        self._waits.set()
        deadline = time.monotonic() + _SILENT_S + _BEAT_S
        while time.monotonic() < deadline:  # until the others have been asked for long enough
            time.sleep(_BEAT_S / 2)
            self.judge(call, self.calls, time.monotonic() - self._entered_at)

    def judge(self, call: str, number: int, waited_s: float) -> None:
        """Called now and then by a rank that waits in a collective. Raises PeerStalled where another one is late."""
        if waited_s < self._notice_s / 4:
            return
        self._waits.set()
        if waited_s >= self._notice_s and self._told_of < number:
            self._told_of = number
            self._tell_the_user(call, number, waited_s)
        if waited_s < self._stall_timeout_s:
            return
        if time.monotonic() - self._answered_at > _SILENT_S and self._store_is_with_rank_0:
            store = "the rendezvous store, which it keeps, does not answer either"
            raise PeerStalled(0, self._text(0, call, number, waited_s, store))
        behind = self._behind(number)
        for rank in behind:
            if self._silence_s(rank) > _SILENT_S or waited_s >= self._patience_s(rank):
                raise PeerStalled(rank, self._text(rank, call, number, waited_s, self._where(rank)))
        if not behind and waited_s >= self._stall_timeout_s + _MARGIN_S:
            text = f"rank {self._rank} has waited {waited_s:.0f} s at {call}, where all ranks have arrived"
            raise PeerStalled(self._rank, text)

    def waited(self) -> None:
        """The wait is over."""
        self._waits.clear()

    def _patience_s(self, rank: int) -> float:
        """Seconds [s] to wait for a rank, by what it does."""
        kind = self._seen[rank].position.kind if rank in self._seen else "works"
        return {
            "works": self._stall_timeout_s,
            "waits": self._stall_timeout_s + _MARGIN_S,
            "pauses": max(self._stall_timeout_s, self._pause_timeout_s),
        }[kind]

    def _silence_s(self, rank: int) -> float:
        """Seconds [s] since a rank was heard of."""
        return time.monotonic() - self._seen[rank].changed_at if rank in self._seen else math.inf

    def _text(self, rank: int, call: str, number: int, waited_s: float, state: str) -> str:
        return (
            f"rank {rank} did not arrive at {call} (collective {number}), where rank {self._rank} has waited "
            f"{waited_s:.0f} s; {state}"
        )

    def _where(self, rank: int) -> str:
        if rank not in self._seen:
            return "it has given no sign of life"
        position, silence = self._seen[rank].position, self._silence_s(rank)
        place = f"{position.what}, after {position.calls} collectives"
        if silence > _SILENT_S:
            return f"it gave its last sign of life {silence:.0f} s ago or more: {place}"
        return f"it is alive: {place}"

    def _behind(self, number: int) -> list[int]:
        """Other ranks that have not entered this collective."""
        return [rank for rank in self._others if rank not in self._seen or self._seen[rank].position.calls < number]

    def _tell_the_user(self, call: str, number: int, waited_s: float) -> None:
        for rank in self._behind(number):
            print(
                f"rank {self._rank} has waited {waited_s:.0f} s at {call} for rank {rank}; {self._where(rank)}",
                file=sys.stderr,
                flush=True,
            )

    def _run(self) -> None:
        """The thread: tells, and asks while this rank waits."""
        while not self._over.is_set():
            try:
                self._tell()
                if self._waits.is_set():
                    self._ask()
                self._answered_at = time.monotonic()
            except RuntimeError:  # the store is slow, or gone with its process: who waits will find out
                pass
            self._over.wait(_BEAT_S)

    def _tell(self) -> None:
        self._beat += 1
        position = self._position
        self._store.set(str(self._rank), json.dumps([self._beat, position.calls, position.what, position.kind]))

    def _ask(self) -> None:
        now = time.monotonic()
        for rank in self._others:
            if not self._store.check([str(rank)]):
                continue
            beat, calls, what, kind = json.loads(self._store.get(str(rank)))
            seen = self._seen.get(rank)
            changed_at = now if seen is None or seen.beat != beat else seen.changed_at
            self._seen[rank] = _Seen(Position(calls, what, kind), beat, changed_at)
