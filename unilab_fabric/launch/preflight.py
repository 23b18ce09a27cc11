"""All that can be known before anything is started: what a run will use, or every reason why it cannot."""

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from unilab_fabric import __version__
from unilab_fabric.checkpoints import read_manifest, saved_config, verify
from unilab_fabric.config import RunConfig, build_learner_config, of_each_rank
from unilab_fabric.errors import Problems, UserError
from unilab_fabric.launch.affinity import cgroup_folders
from unilab_fabric.launch.devices import Topology, resolve_topology
from unilab_fabric.learners.learner import Storage
from unilab_fabric.loop.collector import NO_GRAPHICS
from unilab_fabric.spaces import TaskSpec

NUMPY_VARIABLES = {"OPENBLAS_NUM_THREADS": "1"}
"""For NumPy's own thread pool, which starts when NumPy is loaded, with every core; a rank has no use for it."""

TURN_VARIABLES = {"GOMP_SPINCOUNT": "10000"}
"""For torch's threads, which otherwise keep the cores for milliseconds after a pass, while physics should step."""

_ROOT = Path("/")


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will use; sizes are per rank unless they say "job"."""

    topology: Topology
    task: str
    learner: str
    seed: int
    precision: str
    sums_in_memory: bool
    """Whether the ranks add up in memory that they share."""
    num_envs: int
    sizes: tuple[tuple[str, int], ...]
    """What else there is of each rank, by name."""
    storage: Storage
    learner_bytes: int
    """Memory of the learner [bytes], an estimate."""
    ticks_per_step: int
    """Ticks between two moments at which the run may end."""
    work: str
    """The updates of a tick, in words."""
    max_env_steps: int
    """Environment steps of the job."""
    run_folder: Path
    """The run's folder; where the ranks start apart, rank 0's counts."""
    ckpt_path: Path | None
    """Checkpoint the run continues from."""
    environment: Mapping[str, str]
    """Environment variables that we set, in this process and in those we start."""
    notes: tuple[str, ...] = ()
    """What a user should know about where the settings came from."""

    @property
    def ticks(self) -> int:
        """Ticks of the whole run, those before its checkpoint included."""
        steps = -(-self.max_env_steps // (self.num_envs * self.topology.world_size * self.ticks_per_step))
        return steps * self.ticks_per_step


def preflight(config: RunConfig, notes: tuple[str, ...] = ()) -> Plan:
    """Checks everything that a run needs and says what it will use; starts nothing.

    Raises UserErrors with every problem: topology, task, learner, memory, run folder, checkpoint, length of the run.
    """
    problems = Problems()
    topology = spec = None
    settings = build_learner_config(config.learner)
    folder = new_run_folder(config)
    with problems.gathered():
        topology = resolve_topology(config.training)
        if settings.takes_turns and config.training.collector_cpus is None:
            topology = topology.taking_turns()
        if config.training.batch == "job" and topology.world_size > 1:
            config = of_each_rank(config, topology.world_size)
            notes = (*notes, f"the sizes that were given are the job's, divided among {topology.world_size} ranks")
        settings = build_learner_config(config.learner)
    with problems.gathered():
        spec = task_spec(config)
    if spec is not None:
        with problems.gathered():
            settings.check(spec.num_envs)
    if topology is None or topology.rank == 0:
        with problems.gathered():
            check_run_folder(folder, config)
    if topology is not None and spec is not None:
        for check in (_check_precision, _check_length, _check_memory, _check_checkpoint):
            with problems.gathered():
                check(config, topology, spec)
    problems.raise_any()
    assert topology is not None
    assert spec is not None
    return Plan(
        topology=topology,
        task=config.task.class_path,
        learner=config.learner.class_path,
        seed=config.seed,
        precision=config.training.precision,
        sums_in_memory=config.training.shared_memory and topology.shares_memory,
        num_envs=spec.num_envs,
        sizes=tuple(settings.sizes(spec.num_envs)),
        storage=settings.storage(spec),
        learner_bytes=settings.memory_bytes(spec, config.training.precision),
        ticks_per_step=settings.ticks_per_step,
        work=settings.work(),
        max_env_steps=config.training.max_env_steps,
        run_folder=folder,
        ckpt_path=Path(config.ckpt_path) if config.ckpt_path else None,
        environment=variables_we_set(topology, config.training.deterministic),
        notes=notes,
    )


def banner(plan: Plan) -> str:
    """The decision in full: ranks, devices, cores, sizes per rank and for the job, variables."""
    ranks = plan.topology.world_size
    sizes = [("environments", plan.num_envs), ("environment steps", plan.ticks * plan.num_envs), *plan.sizes]
    memories = [(f"{plan.storage.name} memory", plan.storage.bytes), ("learner memory, about", plan.learner_bytes)]
    return "\n".join(
        [
            f"unilab_fabric {__version__}: {plan.learner} on {plan.task}, {_seed_text(plan.seed, ranks)}",
            *_topology_lines(plan),
            _row("", "per rank", "job"),
            *(_row(name, f"{size:,}", f"{size * ranks:,}") for name, size in sizes),
            *(_row(name, size_text(size), size_text(size * ranks)) for name, size in memories),
            f"  length     {plan.ticks:,} ticks; {plan.work}",
            f"  run folder {plan.run_folder}" + (f", continuing {plan.ckpt_path.name}" if plan.ckpt_path else ""),
            f"  variables  {_variable_text(plan.environment)}",
            "  memory     slots are anonymous; /dev/shm is not used",
            *(f"  note       {note}" for note in plan.notes),
        ]
    )


def task_spec(config: RunConfig) -> TaskSpec:
    """Sizes of the task, from one environment of it. Raises UserError where the task cannot be made."""
    from unilab_fabric.envs.registry import make_task  # MuJoCo and Gymnasium are not needed for `--help`

    init_args = dict(config.task.init_args)
    num_envs = init_args.get("num_envs")
    if isinstance(num_envs, int):
        if num_envs < 1:
            raise UserError("task.num_envs", num_envs, "allowed: 1 or more")
        init_args["num_envs"] = 1
    task = make_task(config.task.class_path, init_args, seed=config.seed, num_threads=1)
    spec = task.task_spec()
    task.close()
    return replace(spec, num_envs=num_envs) if isinstance(num_envs, int) else spec


@contextmanager
def without_graphics() -> Iterator[None]:
    """MuJoCo loaded within it has no renderer, which a run does not need and a machine may lack."""
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = NO_GRAPHICS
    try:
        yield
    finally:
        del os.environ["MUJOCO_GL"]
        if before is not None:
            os.environ["MUJOCO_GL"] = before


def library_variables(topology: Topology, deterministic: bool) -> dict[str, str]:
    """What each rank sets for the libraries it loads afterwards."""
    threads = str(topology.learner_threads)
    variables = {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, **NUMPY_VARIABLES}
    if topology.learner_cpus == topology.collector_cpus and topology.learner_threads > 1:
        variables |= TURN_VARIABLES
    if topology.accelerator == "cuda" and deterministic:
        variables["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it cuBLAS refuses to be deterministic
    return variables


def variables_we_set(
    topology: Topology, deterministic: bool, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Environment variables that a run sets, with the range of values where they differ by rank."""
    variables = library_variables(topology, deterministic)
    if topology.started_by == "us" and topology.world_size > 1:
        each = f"0..{topology.world_size - 1}"
        variables |= {
            "RANK": each,
            "LOCAL_RANK": each,
            "NODE_RANK": "0",
            "WORLD_SIZE": str(topology.world_size),
            "LOCAL_WORLD_SIZE": str(topology.world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "(a free one)",
        }
        if "GLOO_SOCKET_IFNAME" not in environ:
            variables["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return variables


def new_run_folder(config: RunConfig) -> Path:
    """Where the run keeps its files: the named folder, or a new one named after task, learner and time."""
    log_root = Path(config.training.log_root)
    if config.training.run_name:
        return log_root / config.training.run_name
    task = config.task.class_path.removeprefix("gymnasium:").replace("/", "-").rpartition(".")[2]
    name = f"{task}-{config.learner.class_path.rpartition('.')[2]}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = len(list(log_root.glob(f"{name}*")))
    return log_root / (f"{name}-{taken + 1}" if taken else name)


def check_run_folder(folder: Path, config: RunConfig) -> None:
    """Raises UserError where the folder cannot be written, or holds another run than the one to continue."""
    named = config.training.run_name is not None  # a name of ours gives way when the folder is made
    if named and folder.is_dir() and any(folder.iterdir()) and not _continues(folder, config):
        raise UserError(
            "training.run_name",
            folder.name,
            f"{folder} already holds a run; allowed: another name, or --ckpt_path last to continue it",
        )
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        with tempfile.TemporaryDirectory(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            "training.log_root", config.training.log_root, f"{existing} cannot be written: {error.strerror}"
        ) from None


def available_memory(root: Path = _ROOT) -> int | None:
    """Memory [bytes] that the machine, or the container's limit, has left; None where the system does not tell."""
    left = [free for folder in cgroup_folders("memory", root) if (free := _left_in_group(folder)) is not None]
    meminfo = root / "proc/meminfo"
    if meminfo.is_file():
        fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        left.append(int(fields["MemAvailable"].split()[0]) * 1024)
    return min(left, default=None)


def size_text(size: int) -> str:
    """Bytes as a person reads them: 1.2 GB."""
    for unit, bytes_each in [("GB", 10**9), ("MB", 10**6)]:
        if size >= bytes_each:
            return f"{size / bytes_each:.1f} {unit}"
    return f"{size / 1000:.1f} kB"


def _check_precision(config: RunConfig, topology: Topology, _: TaskSpec) -> None:
    if config.training.precision == "tf32" and topology.accelerator == "cpu":
        raise UserError("training.precision", "tf32", "it is for CUDA; allowed on the CPU: auto, 32-true, bf16-mixed")


def _check_length(config: RunConfig, topology: Topology, spec: TaskSpec) -> None:
    tick = spec.num_envs * topology.world_size
    if config.training.max_env_steps < tick:
        raise UserError(
            "training.max_env_steps",
            config.training.max_env_steps,
            f"allowed: {tick} or more, one tick of {topology.world_size} x {spec.num_envs} environments",
        )


def _check_memory(config: RunConfig, topology: Topology, spec: TaskSpec) -> None:
    """The full replay and the learner against the memory they will stand in, which ranks share on the CPU."""
    settings = build_learner_config(config.learner)
    storage = settings.storage(spec)
    on_cpu = topology.accelerator == "cpu"
    available = available_memory() if on_cpu else _smallest_device(topology)
    sharing, where = (topology.local_world_size, "this machine") if on_cpu else (1, "the device")
    learner = settings.memory_bytes(spec, config.training.precision) * sharing
    needed = storage.bytes * sharing
    if available is None or needed + learner <= available:
        return
    fitting = storage.ticks - -(-(needed + learner - available) // (storage.bytes_per_tick * sharing))
    told = f"that takes {size_text(needed)} beside {size_text(learner)} of the learner, and {where} has "
    told += f"{size_text(available)} left; allowed: "
    if fitting < storage.least_ticks:
        told += f"{storage.least_ticks} or more, for which there is no room: a smaller batch or task.num_envs"
    else:
        told += f"{fitting} or less"
    raise UserError(f"learner.{storage.setting}", storage.ticks, told)


def _check_checkpoint(config: RunConfig, topology: Topology, spec: TaskSpec) -> None:
    """What a run that continues may not change, and the work that is left to it."""
    if not config.ckpt_path:
        return
    problems = Problems()
    path = Path(config.ckpt_path)
    manifest = read_manifest(path)
    if topology.rank == 0:  # once, as all of it is read
        verify(path)
    if config.training.max_env_steps <= manifest["env_steps"]:
        problems.add(
            "training.max_env_steps",
            config.training.max_env_steps,
            f"the checkpoint is at {manifest['env_steps']} environment steps of the job; allowed: more than that",
        )
    fixed = [("task", "class_path"), ("learner", "class_path")]
    if manifest["world_size"] == topology.world_size:  # then environments and replay continue too
        fixed += [("learner", build_learner_config(config.learner).storage(spec).setting)]
        if manifest["num_envs"] != spec.num_envs:
            told = f"the checkpoint was made with {manifest['num_envs']}; allowed: that, or a new run"
            problems.add("task.num_envs", spec.num_envs, told)
    for section, name in fixed:
        now, then = (_setting(run[section], name) for run in (asdict(config), saved_config(path)))
        if now != then:
            field = section if name == "class_path" else f"{section}.{name}"
            problems.add(field, now, f"the checkpoint was made with {then}; allowed: that, or a new run")
    problems.raise_any()


def _setting(section: Mapping[str, Any], name: str) -> Any:
    return section["class_path"] if name == "class_path" else section["init_args"].get(name)


def _continues(folder: Path, config: RunConfig) -> bool:
    return config.ckpt_path is not None and Path(config.ckpt_path).resolve().is_relative_to(folder.resolve())


def _smallest_device(topology: Topology) -> int:
    """Memory [bytes] of the smallest CUDA device of this machine's ranks."""
    import torch

    return min(torch.cuda.get_device_properties(device).total_memory for device in topology.devices)


def _left_in_group(folder: Path) -> int | None:
    """Memory that a control group may still take, version 2 or 1."""
    for limit, usage in [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")]:
        if (folder / limit).is_file() and (text := (folder / limit).read_text().strip()) != "max":
            return max(0, int(text) - int((folder / usage).read_text()))
    return None


def _topology_lines(plan: Plan) -> list[str]:
    topology, count = plan.topology, plan.topology.world_size
    where = "the CPU" if topology.accelerator == "cpu" else f"CUDA devices {_numbers(topology.devices)}"
    backend = {"cpu": "gloo", "cuda": "NCCL"}[topology.accelerator] if count > 1 else "no process group"
    if plan.sums_in_memory:
        backend += ", sums in shared memory"
    if topology.num_nodes > 1:
        where = f"{topology.num_nodes} machines, {topology.local_world_size} each on {where}"
    starter = f"started by {topology.started_by}" if topology.started_by != "us" else "started by this command"
    held = "held to them" if topology.pinned else "not pinned"
    cores = "; ".join(
        f"rank {rank}: {_numbers(cpus)} (physics {_numbers(physics)}, learner {_numbers(learner)})"
        for rank, (cpus, physics, learner) in enumerate(
            zip(topology.cpus, topology.collector_cpus, topology.learner_cpus, strict=True)
        )
    )
    return [
        f"  ranks      {count} on {where}, {starter}; {backend}; precision {plan.precision}",
        f"  cores      {cores}; {held}",
        f"  threads    per rank: physics {topology.physics_threads}, learner {topology.learner_threads}",
    ]


def _seed_text(seed: int, ranks: int) -> str:
    return f"seed {seed}" if ranks == 1 else f"seeds {seed} to {seed + ranks - 1}"


def _numbers(numbers: tuple[int, ...]) -> str:
    """Ascending runs as the kernel writes them: 0-3,8."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _row(name: str, per_rank: str, job: str) -> str:
    return f"  {name:<24}{per_rank:>16}{job:>16}"


def _variable_text(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items())
