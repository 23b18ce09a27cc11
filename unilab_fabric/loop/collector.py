"""The other process of a rank: environments on its CPU cores, numpy only, never torch, never CUDA.

The learner starts it as `python -m unilab_fabric.loop.collector` with one end of a socket, sends what to run, and
then releases one slot a tick. The process ends when told to, when the socket closes, or when its parent is gone.
"""

import faulthandler
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from unilab_fabric.errors import UserError
from unilab_fabric.lifeline import die_with_parent
from unilab_fabric.loop.slots import (
    NUM_SLOTS,
    Channel,
    PeerGone,
    Slot,
    Stalled,
    map_slots,
    slot_bytes,
    spec_from_message,
    spec_to_message,
)
from unilab_fabric.memory import anonymous_memory
from unilab_fabric.spaces import TaskSpec

if TYPE_CHECKING:  # the learner's side needs no environment
    from unilab_fabric.envs.vector_env import Fault, TaskEnv

NONFINITE = "nonfinite"
"""Folder of the run that takes what is found of values that are not finite."""
NO_GRAPHICS = "off"
"""Value of MUJOCO_GL with which MuJoCo loads no renderer."""
_EXIT_GRACE_S = 2.0


@dataclass(frozen=True, kw_only=True)
class CollectorConfig:
    """What a collector runs."""

    class_path: str
    """Task, as `unilab_fabric.envs.registry.make_task` takes it."""
    init_args: dict[str, Any]
    """The task's own settings, plain values."""
    seed: int
    """Seed of this rank's environments."""
    num_threads: int
    """Physics threads."""
    cpus: tuple[int, ...] | None = None
    """Cores this process may use; None leaves the mask as it is."""
    state_file: str | None = None
    """Environment state to continue from, written by `save_state`."""


class CollectorFailed(RuntimeError):
    """A collector ended before its rank did, or has not done its part in time."""

    def __init__(self, text: str, *, rank: int, pid: int, status: int, trace: str = "") -> None:
        super().__init__(f"{text}:\n{trace}" if trace else text)
        self.text = text
        self.rank = rank
        self.pid = pid
        self.status = status
        """Exit status as a shell shows it; 1 for one that was late."""
        self.trace = trace
        """The collector's own traceback, where it could send one."""


class Collector:
    """The learner's side: starts the process, waits for slots, releases them, ends the process."""

    def __init__(self, config: CollectorConfig, *, rank: int, deadline_s: float) -> None:
        """Starts the process and returns at once; `connect` waits for it. `deadline_s` [s] bounds every wait."""
        ours, theirs = socket.socketpair()
        self.rank = rank
        self.deadline_s = deadline_s
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=_environment(os.environ),
            )
        self._channel = Channel(ours, f"rank {rank}: collector {self._process.pid}")
        self._channel.send({**config.__dict__})
        self.slots: tuple[Slot, ...] = ()
        """The slots, once connected."""
        self._filled = -1  # newest tick whose slot the collector has handed over

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def connect(self) -> TaskSpec:
        """The task's specification, once the environments stand and slot 0 is filled."""
        message = self._receive("create the environments")
        spec = spec_from_message(message["spec"])
        descriptor = self._channel.receive_descriptor(self.deadline_s, "hand over its slots")
        self.slots = map_slots(descriptor, spec)
        os.close(descriptor)
        return spec

    def wait_filled(self, tick: int) -> Slot:
        """The slot with observation `tick` and transition `tick` - 1; waits for it where it is not filled yet."""
        if self._filled < tick:
            self._receive(f"fill the slot of tick {tick}", expects_message=False)
            self._filled = tick
        return self.slots[tick % NUM_SLOTS]

    def release(self) -> None:
        """Lets the collector take the next step; its action stands in `next_slot`."""
        try:
            self._channel.signal()
        except PeerGone as error:
            raise self._failed(error) from None

    def next_slot(self, tick: int) -> Slot:
        """The slot that step `tick` fills; until its release the learner's, to write the action into."""
        return self.slots[(tick + 1) % NUM_SLOTS]

    def resume_at(self, tick: int, slot: bytes | None) -> None:
        """Continues at `tick` with the slot that a checkpoint holds, or with the environments as they stand now."""
        fresh = self.wait_filled(0)
        stop = int(fresh.stop[0])
        self.slots[tick % NUM_SLOTS].memory[:] = fresh.memory if slot is None else slot
        self.slots[tick % NUM_SLOTS].stop[0] = stop  # what stopped the run before does not stop this one
        self._filled = tick
        self._channel.send({"tick": tick})

    def note_faults_in(self, folder: Path) -> None:
        """From now on the first faults of each kind are described in `folder`, one file for each."""
        self._channel.send({"faults": str(folder), "rank": self.rank})

    def save_state(self, path: Path, next_tick: int) -> bytes | None:
        """Writes the environments' state of the moment when `next_tick` starts; returns that tick's slot.

        None, and no file, if the environments cannot give their state.
        """
        slot = bytes(self.wait_filled(next_tick).memory)
        self._channel.send({"save": str(path)})
        saved: bool = self._receive("save the environments")["saved"]
        return slot if saved else None

    def close(self) -> None:
        """Ends the process: asks, then makes it; lets go of the slots."""
        self._channel.close()
        self.slots = ()
        try:
            self._process.wait(_EXIT_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, what: str, *, expects_message: bool = True) -> dict[str, Any]:
        try:
            message = self._channel.receive(self.deadline_s, what)
        except PeerGone as error:
            raise self._failed(error) from None
        except Stalled as error:
            text = f"{error}{'; it is stopped' if is_stopped(self.pid) else ''}"
            raise CollectorFailed(text, rank=self.rank, pid=self.pid, status=1) from None
        if message and "refused" in message:
            raise UserError(*message["refused"])
        if message and "error" in message:
            text = f"rank {self.rank}: collector {self.pid} failed: {message['error'].splitlines()[-1]}"
            raise CollectorFailed(text, rank=self.rank, pid=self.pid, status=1, trace=message["error"])
        if (message is not None) != expects_message:
            raise RuntimeError(f"rank {self.rank}: collector sent {message} where the learner expected it to {what}")
        return message or {}

    def _failed(self, error: PeerGone) -> CollectorFailed:
        code = self._process.wait(_EXIT_GRACE_S)
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        status = 128 - code if code < 0 else code
        return CollectorFailed(f"{error}: {how}", rank=self.rank, pid=self.pid, status=status)


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal; False where the system does not tell."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] in "Tt"


_asked_to_end = 0
"""Number of the signal that asked this collector to end."""


def _on_signal(number: int, _: object) -> None:
    """The rank decides when to end; it reads the number in the next slot."""
    global _asked_to_end
    _asked_to_end = number


def _environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """The variables of a collector: none of ranks, GPUs or graphics, one thread in every numerical library."""
    ranks = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in inherited.items() if name not in ranks}
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | one_thread | {"CUDA_VISIBLE_DEVICES": "", "MUJOCO_GL": NO_GRAPHICS}


def main(argv: Sequence[str]) -> int:
    """Runs a collector on the socket and under the parent named in `argv`; returns the exit status."""
    die_with_parent(int(argv[1]))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _on_signal)
    faulthandler.enable()  # native code that crashes leaves its traceback in the rank's output
    channel = Channel(socket.socket(fileno=int(argv[0])), "the learner")
    try:
        _collect(channel)
    except UserError as problem:
        channel.send({"refused": [problem.field, str(problem.value), problem.allowed]})
        return 2
    except PeerGone:
        return 0  # the rank has ended or closed its end: nothing is left to do
    except Exception:  # whatever the task raised is the rank's to report, in the task's own words
        channel.send({"error": traceback.format_exc()})
        return 1
    return 0


def _collect(channel: Channel) -> None:
    request = channel.receive(None, "say what to run")
    assert request is not None
    config = CollectorConfig(**request)
    if config.cpus:
        os.sched_setaffinity(0, config.cpus)
    from unilab_fabric.envs.registry import make_task  # after the mask: mjbatch counts the cores it may use

    env = make_task(config.class_path, config.init_args, seed=config.seed, num_threads=config.num_threads)
    env.reset(seed=config.seed)
    if config.state_file:
        _restore(env, Path(config.state_file))
    spec = env.task_spec()
    descriptor = anonymous_memory(NUM_SLOTS * slot_bytes(spec))
    slots = map_slots(descriptor, spec)
    channel.send({"spec": spec_to_message(spec)}, descriptor)
    os.close(descriptor)

    tick = 0
    slots[tick].actor[:] = env.observation["actor"]
    slots[tick].critic[:] = env.observation["critic"]
    slots[tick].stop[0] = _asked_to_end
    channel.signal()
    notes = _FaultNotes()
    waiting_since = time.perf_counter()
    while True:
        message = channel.receive(None, "release a slot")  # no deadline: the rank's death closes the socket
        if message is None:
            started = time.perf_counter()
            tick += 1
            slot = slots[tick % NUM_SLOTS]
            env.physics_s = 0.0
            env.advance(slot.action)
            advanced = time.perf_counter()
            _fill(slot, env)
            if env.faults:
                notes.take(env.faults, tick)
            filled = time.perf_counter()
            slot.collector_s[:] = (
                env.physics_s,
                advanced - started - env.physics_s,
                filled - advanced,
                started - waiting_since,
            )
            waiting_since = filled
            channel.signal()
        elif "faults" in message:
            notes = _FaultNotes(Path(message["faults"]), message["rank"])
        elif "save" in message:
            channel.send({"saved": _save(env, Path(message["save"]))})
        else:
            tick = message["tick"]


def _restore(env: "TaskEnv", file: Path) -> None:
    """Continues the environments. Raises UserError where the task's settings no longer fit their state."""
    with np.load(file, allow_pickle=False) as state:
        arrays = dict(state)
    try:
        env.set_state(arrays)
    except ValueError as error:
        raise UserError(
            "task", env.name, f"{file} is of other settings of it: {error}; allowed: the run's own"
        ) from None


def _fill(slot: Slot, env: "TaskEnv") -> None:
    """Copies what a step has left into the slot."""
    slot.actor[:] = env.observation["actor"]
    slot.critic[:] = env.observation["critic"]
    slot.reward[:] = env.reward
    slot.terminated[:] = env.terminated
    ended = np.flatnonzero(env.terminated | env.truncated)
    slot.ended[0] = len(ended)
    if len(ended):
        slot.ended_env[: len(ended)] = ended
        slot.final_actor[: len(ended)] = env.next_observation["actor"][ended]
        slot.final_critic[: len(ended)] = env.next_observation["critic"][ended]
    slot.totals[:] = env.totals
    slot.stop[0] = _asked_to_end
    env.totals[:] = 0.0


class _FaultNotes:
    """Writes faults of environments down, where it has been told a folder."""

    def __init__(self, folder: Path | None = None, rank: int = 0) -> None:
        self._folder = folder
        self._rank = rank

    def take(self, faults: "list[Fault]", tick: int) -> None:
        """Empties the list. A disk that takes nothing does not end the run for it."""
        for fault in faults:
            if self._folder is not None:
                self._write(self._folder, fault, tick)
        faults.clear()

    def _write(self, folder: Path, fault: "Fault", tick: int) -> None:
        kind = fault.kind.removeprefix("Env/")
        name = f"rank-{self._rank}-tick-{tick:09d}-env-{fault.environment}-{kind}.json"
        # numbers that are not finite are no JSON, so they are written as texts
        values = {what: [v if math.isfinite(v) else str(v) for v in row] for what, row in fault.values.items()}
        figures = {"tick": tick, "rank": self._rank, **asdict(fault), "kind": kind, "values": values}
        try:
            folder.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            print(f"warning: {folder / name} could not be written: {error}", file=sys.stderr)


def _save(env: "TaskEnv", path: Path) -> bool:
    """Writes the environments' state; False where they cannot give it."""
    from unilab_fabric.envs.vector_env import StateUnavailable

    try:
        state = env.get_state()
    except StateUnavailable:
        return False
    try:
        with path.open("wb") as file:
            np.savez(file, allow_pickle=False, **state)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None  # the system does not say which file
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
