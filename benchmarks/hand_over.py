"""How long does a tick's hand-over between learner and collector take, beside one through a pipe?

    python benchmarks/hand_over.py [--json PATH] [--quick]

Go2, 256 environments. One call is a round trip: actions to the other process, observations, rewards and flags back, and
nothing computed between. The reference sends both as pickled arrays through `multiprocessing.Pipe`, as vector
environments in processes do. Ours writes them into a slot of shared memory and signals; `empty` is the two signals
alone. The two processes are held to a core each where there are two.
"""

import argparse
import json
import multiprocessing
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from shared.jobs import on_cores
from shared.timing import in_turn, machine, table

from unilab_fabric.loop.slots import HEAD, NUM_SLOTS, Channel, map_slots, slot_bytes, spec_from_message, spec_to_message
from unilab_fabric.loop.transfer import SharedTransfer
from unilab_fabric.memory import anonymous_memory
from unilab_fabric.spaces import TaskSpec

REFERENCE, OURS, EMPTY = "a pipe, pickled arrays", "a slot", "a slot, empty"
GO2 = TaskSpec(
    name="Go2JoystickFlat",
    num_envs=256,
    actor_size=49,
    critic_size=52,
    action_low=(-1.0,) * 12,
    action_high=(1.0,) * 12,
    metrics=(),
    mirrors=None,
)
_END_S = 10.0
_WAIT_S = 60.0


def answer_in_slots(end: socket.socket, core: int) -> None:
    """The other process: takes actions from a slot and leaves everything else there; empty where the slot says so."""
    os.sched_setaffinity(0, {core})
    channel = Channel(end, "the benchmark")
    message = channel.receive(_WAIT_S, "say what to hand over")
    assert message is not None
    slots = map_slots(channel.receive_descriptor(_WAIT_S, "send the slots"), spec_from_message(message))
    arrays = {name: getattr(slots[0], name).copy() for name in HEAD}
    slot = slots[1]
    while (message := channel.receive(None, "hand a slot over")) is None:
        if not slot.stop[0]:
            for name in HEAD[1:]:
                getattr(slot, name)[:] = arrays[name]
        channel.signal()


def answer_in_pipe(end: Connection, core: int) -> None:
    """The other process: receives actions and sends everything else."""
    os.sched_setaffinity(0, {core})
    message = end.recv()
    slots = map_slots(anonymous_memory(NUM_SLOTS * slot_bytes(message)), message)
    arrays = {name: getattr(slots[0], name).copy() for name in HEAD[1:]}
    while end.recv() is not None:
        end.send(arrays)


@contextmanager
def other_process(target: Callable[[Any, int], None], end: Any, core: int) -> Iterator[None]:
    """Runs on a core with its end of the connection; ends it."""
    process = multiprocessing.get_context("spawn").Process(target=target, args=(end, core), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.join(_END_S)
        process.kill()
        process.join()


def measure(repeats: int, seconds: float) -> dict[str, dict[str, float]]:
    """Prints and returns the table."""
    cores = sorted(os.sched_getaffinity(0))
    ours, theirs = socket.socketpair()
    pipe, other_pipe = multiprocessing.Pipe()
    with (
        on_cores({cores[0]}),
        other_process(answer_in_slots, theirs, cores[-1]),
        other_process(answer_in_pipe, other_pipe, cores[-1]),
    ):
        theirs.close()
        channel, transfer = Channel(ours, "the other process"), SharedTransfer()
        descriptor = anonymous_memory(NUM_SLOTS * slot_bytes(GO2))
        slots = map_slots(descriptor, GO2)
        channel.send(spec_to_message(GO2), descriptor)
        os.close(descriptor)
        pipe.send(GO2)
        actions, slot = torch.zeros(GO2.num_envs, GO2.action_size), slots[1]

        def through_pipe() -> None:
            pipe.send(actions.numpy())
            for array in pipe.recv().values():
                torch.from_numpy(array)

        def through_slot() -> None:
            slot.stop[0] = 0
            transfer.give(actions, slot)
            channel.signal()
            channel.receive(_WAIT_S, "fill a slot")
            transfer.take(slot)

        def empty() -> None:
            slot.stop[0] = 1
            channel.signal()
            channel.receive(_WAIT_S, "signal")

        try:
            times = in_turn({REFERENCE: through_pipe, OURS: through_slot, EMPTY: empty}, repeats, seconds)
        finally:
            channel.send({"end": True})
            pipe.send(None)
    return table("a round trip, Go2, 256 environments", times, REFERENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--quick", action="store_true", help="few short repeats: shows that it runs, not how fast")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    described = machine()
    print(f"{described['processor']}, torch {described['torch']}")
    numbers = measure(*((2, 0.05) if arguments.quick else (9, 0.5)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, "round_trip": numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
