"""From `training.devices` to one rank per device, or to every problem with it; decided once, before anything starts."""

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from unilab_fabric.config import TrainingConfig
from unilab_fabric.errors import Problems, UserError
from unilab_fabric.launch.affinity import affinity_mask, allowed_cores, cpus_of, physical_cores, split_cores

Accelerator = Literal["cpu", "cuda"]
Devices = int | list[int] | Literal["auto"] | None
Starter = Literal["us", "torchrun", "slurm", "mpi"]

_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
_RANK_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")
_FABRIC_VARIABLES = ("LT_ACCELERATOR", "LT_DEVICES", "LT_NUM_NODES", "LT_PRECISION", "LT_STRATEGY")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_NAMES: Mapping[Starter, str] = {"us": "our launcher", "torchrun": "torchrun", "slurm": "SLURM", "mpi": "MPI"}


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Ranks, devices and cores of a job, as one of its ranks sees them."""

    accelerator: Accelerator
    devices: tuple[int, ...]
    """Device of each local rank; on the CPU just 0, 1, ..."""
    num_nodes: int
    """Machines."""
    started_by: Starter
    """Who starts the ranks: our launcher, or the program that started this process."""
    node_rank: int
    """Number of this machine."""
    local_rank: int
    """Number of this rank on its machine."""
    cpus: tuple[tuple[int, ...], ...]
    """Logical CPUs of each local rank: whole physical cores where there are enough, disjoint between ranks."""
    collector_cpus: tuple[tuple[int, ...], ...]
    """The part of them that each local rank's physics uses."""
    physics_threads: int
    """Threads of each rank's physics."""
    learner_threads: int
    """Threads of each rank's learner on the CPU."""
    pinned: bool
    """Whether ranks and collectors are held to these CPUs; with one rank the system places the threads."""

    def dump(self) -> str:
        """As text, which `load_topology` reads back."""
        return json.dumps(asdict(self))

    @property
    def local_world_size(self) -> int:
        """Ranks of this machine."""
        return len(self.devices)

    @property
    def world_size(self) -> int:
        """Ranks of the job."""
        return self.num_nodes * self.local_world_size

    @property
    def shares_memory(self) -> bool:
        """Whether several ranks compute in the memory of one machine."""
        return self.world_size > 1 and self.num_nodes == 1 and self.accelerator == "cpu"

    @property
    def rank(self) -> int:
        """Number of this rank in the job."""
        return self.node_rank * self.local_world_size + self.local_rank

    def taking_turns(self) -> "Topology":
        """The same, with all cores of a rank for its physics and for its learner, where these take turns."""
        apart = self.learner_cpus != self.cpus
        threads = self.physics_threads + self.learner_threads if apart else self.physics_threads
        return replace(self, collector_cpus=self.cpus, physics_threads=threads, learner_threads=threads)

    @property
    def learner_cpus(self) -> tuple[tuple[int, ...], ...]:
        """Logical CPUs of each local rank's learner: what physics leaves, or all where it leaves none."""
        pairs = zip(self.cpus, self.collector_cpus, strict=True)
        return tuple(tuple(cpu for cpu in cpus if cpu not in physics) or cpus for cpus, physics in pairs)


def load_topology(text: str, local_rank: int) -> Topology:
    """What `Topology.dump` wrote, as another rank of the same machine sees it."""
    fields = json.loads(text)
    for name in ("cpus", "collector_cpus"):
        fields[name] = tuple(map(tuple, fields[name]))
    return Topology(**{**fields, "devices": tuple(fields["devices"]), "local_rank": local_rank})


def resolve_topology(training: TrainingConfig, environ: Mapping[str, str] = os.environ) -> Topology:
    """Ranks, devices and cores for `training` in this environment.

    Raises UserErrors with every problem found: devices that are not there, more ranks than cores, rank variables
    that contradict what is asked, a world size that torchrun, SLURM or MPI sees differently.
    """
    problems = Problems()
    started = _Started(by="us")
    with problems.gathered():
        _check_fabric_variables(environ)
    with problems.gathered():
        started = _who_started(environ)
    if started.by == "mpi" and mpi4py_is_missing():  # Fabric would not see MPI, and every rank would train alone
        problems.add("OMPI_COMM_WORLD_SIZE", started.world_size, "to train under MPI, install mpi4py")
    with problems.gathered():
        accelerator, available = _accelerator(training)
        devices = _devices(training.devices, accelerator, available, started)
        with problems.gathered():
            _check_world(training, len(devices), started)
        with problems.gathered():
            _check_leftovers(training, len(devices), started, environ)
        placement = _placement(training, accelerator, len(devices))
    problems.raise_any()
    return Topology(
        accelerator=accelerator,
        devices=devices,
        num_nodes=training.num_nodes,
        started_by=started.by,
        node_rank=started.node_rank,
        local_rank=started.local_rank,
        cpus=placement.cpus,
        collector_cpus=placement.collector_cpus,
        physics_threads=placement.physics_threads,
        learner_threads=placement.learner_threads,
        pinned=placement.pinned,
    )


def cuda_device_count() -> int:
    """CUDA devices that PyTorch may use; loads torch only where an NVIDIA driver is visible."""
    if not any(Path(file).exists() for file in _DRIVER_FILES):
        return 0
    import torch

    return torch.cuda.device_count()


def mpi4py_is_missing() -> bool:
    """Whether the package by which Fabric sees MPI is not installed."""
    return importlib.util.find_spec("mpi4py") is None


# who started this process


@dataclass(frozen=True, kw_only=True)
class _Started:
    """What the program that started this process says about the job; sizes are None where it says nothing."""

    by: Starter
    world_size: int | None = None
    local_world_size: int | None = None
    node_rank: int = 0
    local_rank: int = 0


def _who_started(environ: Mapping[str, str]) -> _Started:
    """torchrun, SLURM and MPI in the order in which Fabric looks for them, then us."""
    number = _Numbers(environ)
    if "TORCHELASTIC_RUN_ID" in environ:
        return _Started(
            by="torchrun",
            world_size=number["WORLD_SIZE"],
            local_world_size=number["LOCAL_WORLD_SIZE"],
            node_rank=number["GROUP_RANK"],
            local_rank=number["LOCAL_RANK"],
        )
    if "SLURM_NTASKS" in environ and environ.get("SLURM_JOB_NAME") not in ("bash", "interactive"):
        return _Started(
            by="slurm",
            world_size=number["SLURM_NTASKS"],
            local_world_size=number["SLURM_NTASKS"] // max(1, number.get("SLURM_NNODES", 1)),
            node_rank=number.get("SLURM_NODEID", 0),
            local_rank=number.get("SLURM_LOCALID", 0),
        )
    if number.get("OMPI_COMM_WORLD_SIZE", 1) > 1:
        return _Started(
            by="mpi",
            world_size=number["OMPI_COMM_WORLD_SIZE"],
            local_world_size=number["OMPI_COMM_WORLD_LOCAL_SIZE"],
            node_rank=number["OMPI_COMM_WORLD_RANK"] // max(1, number["OMPI_COMM_WORLD_LOCAL_SIZE"]),
            local_rank=number["OMPI_COMM_WORLD_LOCAL_RANK"],
        )
    return _Started(by="us")


class _Numbers:
    """Whole numbers among the environment variables; a UserError where one is missing or is not a number."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ

    def __getitem__(self, name: str) -> int:
        text = self._environ.get(name)
        if text is None or not text.isdecimal():
            raise UserError(name, text or "not set", "allowed in the environment: a whole number, 0 or more")
        return int(text)

    def get(self, name: str, default: int) -> int:
        return self[name] if name in self._environ else default


# contradictions


def _check_world(training: TrainingConfig, local_ranks: int, started: _Started) -> None:
    """The ranks asked for against those that another program has started already."""
    if started.world_size is None:
        if training.num_nodes > 1:
            raise UserError(
                "training.num_nodes",
                training.num_nodes,
                "allowed: 1, unless torchrun, SLURM or MPI starts the processes; none of them started this one",
            )
        return
    if started.local_world_size != local_ranks:
        raise UserError(
            "training.devices",
            _as_yaml(training.devices),
            f"that is {_count(local_ranks, 'rank')} on this machine, but {_NAMES[started.by]} started "
            f"{started.local_world_size}; the two must agree",
        )
    if started.world_size != local_ranks * training.num_nodes:
        raise UserError(
            "training.num_nodes",
            training.num_nodes,
            f"{_NAMES[started.by]} started {_count(started.world_size, 'rank')}, {local_ranks} on this machine; "
            f"allowed: {started.world_size // local_ranks}",
        )


def _check_leftovers(training: TrainingConfig, local_ranks: int, started: _Started, environ: Mapping[str, str]) -> None:
    """Rank variables in an environment where nobody but us starts ranks: Fabric would believe them and wait."""
    if started.world_size is not None:
        return
    problems = Problems()
    harmless = {"WORLD_SIZE": str(local_ranks), "LOCAL_WORLD_SIZE": str(local_ranks), "NODE_RANK": "0"}
    if local_ranks == 1:
        harmless |= {"RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name in _RANK_VARIABLES:
        if name in environ and environ[name] != harmless.get(name):
            problems.add(
                name,
                environ[name],
                f"left over in the environment, it contradicts training.devices = {_as_yaml(training.devices)} "
                f"({_count(local_ranks, 'rank')}, started by us); unset it",
            )
    if local_ranks > 1 and environ.get("MASTER_ADDR", "localhost") not in _LOOPBACK:
        problems.add("MASTER_ADDR", environ["MASTER_ADDR"], "all ranks are on this machine; unset it")
    problems.raise_any()


def _check_fabric_variables(environ: Mapping[str, str]) -> None:
    problems = Problems()
    for name in _FABRIC_VARIABLES:
        if name in environ:
            problems.add(name, environ[name], "Fabric would put it before the configuration; unset it")
    problems.raise_any()


# devices


def _accelerator(training: TrainingConfig) -> tuple[Accelerator, int]:
    """The device kind and the number of its visible devices; 0 on the CPU, which has none."""
    available = 0 if training.accelerator == "cpu" else cuda_device_count()
    if available:
        return "cuda", available
    if training.accelerator == "cuda":
        raise UserError("training.accelerator", "cuda", "PyTorch sees no CUDA device; allowed here: auto, cpu")
    return "cpu", 0


def _devices(asked: Devices, accelerator: Accelerator, available: int, started: _Started) -> tuple[int, ...]:
    """Device of each local rank."""
    if asked == "auto":
        return tuple(range(available if accelerator == "cuda" else started.local_world_size or 1))
    if isinstance(asked, int):
        if asked < 1:
            raise UserError("training.devices", asked, "allowed: 1 or more, a list of devices, auto or null")
        wanted = list(range(asked))
    else:
        wanted = list(asked or [0])
    if len(set(wanted)) < len(wanted):
        raise UserError("training.devices", asked, "allowed: each device once")
    if accelerator == "cpu":
        # the CPU is one device: a list can only count ranks, and one that skips a number was meant for other hardware
        if sorted(wanted) != list(range(len(wanted))):
            raise UserError("training.devices", asked, "allowed on the CPU: n or [0, ..., n - 1] for n ranks")
        return tuple(range(len(wanted)))
    if not set(wanted) <= set(range(available)):
        raise UserError("training.devices", asked, f"this machine has {_listed(available)}")
    return tuple(wanted)


def _listed(available: int) -> str:
    if available == 1:
        return "one device, 0"
    if available == 2:
        return "devices 0 and 1"
    return f"devices 0 to {available - 1}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _as_yaml(asked: Devices) -> object:
    return "null" if asked is None else asked


# cores


@dataclass(frozen=True, kw_only=True)
class _Placement:
    cpus: tuple[tuple[int, ...], ...]
    collector_cpus: tuple[tuple[int, ...], ...]
    physics_threads: int
    learner_threads: int
    pinned: bool


def _placement(training: TrainingConfig, accelerator: Accelerator, ranks: int) -> _Placement:
    """Cores of each rank and its physics; one thread for each core, so that hyper-threads do not compete."""
    cores = allowed_cores(needed=ranks)
    if ranks > len(cores):
        raise UserError(
            "training.devices",
            _as_yaml(training.devices),
            f"that is {ranks} ranks, and each needs a CPU core; this process may use {_count(len(cores), 'core')}",
        )
    if training.collector_cpus is not None:
        return _placement_as_told(training.collector_cpus, ranks)
    blocks = split_cores(cores, ranks)
    share = len(blocks[0])
    physics = max(1, share - 1) if accelerator == "cuda" else (share + 1) // 2
    return _Placement(
        cpus=tuple(cpus_of(block) for block in blocks),
        collector_cpus=tuple(cpus_of(block[:physics]) for block in blocks),
        physics_threads=physics,
        learner_threads=max(1, share - physics),
        pinned=ranks > 1,
    )


def _placement_as_told(lists: list[list[int]], ranks: int) -> _Placement:
    """The user's cores for physics; the rest, in equal blocks, for the learners."""
    allowed = affinity_mask()
    everyone = [cpu for cpus in lists for cpu in cpus]

    def refuse(allowed: str) -> UserError:
        return UserError("training.collector_cpus", lists, allowed)

    if len(lists) != ranks:
        raise refuse(f"allowed: one list for each rank of this machine, {ranks} in all")
    if len({len(cpus) for cpus in lists}) > 1 or not everyone:
        raise refuse("allowed: lists of one length, 1 or more; ranks wait for the slowest")
    if len(set(everyone)) < len(everyone):
        raise refuse("allowed: each core once")
    if not set(everyone) <= set(allowed):
        raise refuse(f"this process may use cores {', '.join(map(str, allowed))}")
    free = physical_cores(set(allowed) - set(everyone))
    blocks = split_cores(free, ranks) if len(free) >= ranks else ((),) * ranks
    return _Placement(
        cpus=tuple(tuple(sorted((*cpus, *cpus_of(block)))) for cpus, block in zip(lists, blocks, strict=True)),
        collector_cpus=tuple(map(tuple, lists)),
        physics_threads=len(lists[0]),
        learner_threads=max(1, len(blocks[0])),
        pinned=True,
    )
