"""The typed configuration of a run, and how it is read and written; a learner's and a task's own settings stand
beside them.

Loads neither torch nor Lightning: the command line must answer within a second.
"""

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from unilab_fabric.arguments import (
    argument_names,
    argument_types,
    build,
    check_arguments,
    check_given,
    read_yaml,
    shown,
    suggest,
    takes_any_argument,
)
from unilab_fabric.errors import Problems, UserError, nearest

if TYPE_CHECKING:
    from unilab_fabric.learners.learner import LearnerConfig


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a job runs. Values are for the whole job unless they say "per rank"."""

    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device kind; auto takes CUDA devices where there are any, else the CPU."""
    devices: int | list[int] | Literal["auto"] | None = None
    """Devices of each machine, one rank on each: null, [], [0] or 1 for one rank, n for the first n, a list for
    those visible devices in that order, auto for all of them. On the CPU n is the number of processes, and so is the
    length of [0, ..., n - 1]."""
    num_nodes: int = 1
    """Machines in the job; more than one needs torchrun, SLURM or MPI to start the processes."""
    precision: Literal["auto", "32-true", "tf32", "bf16-mixed"] = "auto"
    """Arithmetic of forward and backward passes; parameters stay float32. auto takes bf16-mixed where the device has
    fast bf16 instructions, else 32-true; tf32 is for CUDA and rounds the factors of float32 products to ten bits."""
    max_env_steps: int = 2_000_000
    """Environment steps of the job, all ranks together; the run ends at the first tick that reaches it."""
    batch: Literal["per_rank", "job"] = "per_rank"
    """Whether task.num_envs and the learner's batch_size are each rank's, so that more ranks mean more of them, or the
    job's, which the ranks divide among them."""
    log_root: str = "runs"
    """Folder that holds the run folders."""
    run_name: str | None = None
    """Name of the run folder; null makes one from the task, the learner and the time."""
    log_every: int = 50
    """Ticks between two reports of metrics."""
    replica_check_every: int = 500
    """Ticks between two comparisons of the replicated state of all ranks; 0 never compares."""
    max_skipped_updates: int = 200
    """Optimiser steps in a row that may be left out for a non-finite gradient before the job ends with an error."""
    collector_cpus: list[list[int]] | None = None
    """CPU cores of each rank's collector, one list per rank of this machine; null splits the allowed cores."""
    deterministic: bool = False
    """On CUDA, refuse operations without a deterministic implementation and take the slower ones that have one. On the
    CPU a run repeats bit for bit either way."""
    stall_timeout_s: float = 120.0
    """Seconds [s] a rank waits for its collector or for another rank before the job ends with an error."""
    pause_timeout_s: float = 3600.0
    """Seconds [s] the ranks wait for one that is inside a hook or compiles its kernels before the job ends with an
    error; a line says for whom they wait."""
    profile: int = 0
    """Ticks of each rank that PyTorch's profiler traces into the run's `profile/`, once its updates go on."""
    play_after: bool = False
    """After a completed run, film its policy into the run's `play/`, once all ranks have left the process group; where
    nothing can be drawn a warning says why."""
    cuda_graphs: bool = True
    """On CUDA, replay the updates of a tick as one graph; where that is not possible a line says so and they run one
    kernel after the other, as they do with false. With debug_collectives they always do."""
    gradient_wire: Literal["float32", "bfloat16"] = "float32"
    """What gradients travel as between ranks; bfloat16 halves the bytes and keeps three digits, for slow links."""
    shared_memory: bool = True
    """On the CPU, ranks of one machine average their gradients in memory that they share, and not through gloo."""
    debug_collectives: bool = False
    """Compare what the ranks are about to do before every collective, and name the call sites if it differs; slow."""

    def __post_init__(self) -> None:
        for name, least in [
            ("max_env_steps", 1),
            ("num_nodes", 1),
            ("log_every", 1),
            ("replica_check_every", 0),
            ("profile", 0),
            ("max_skipped_updates", 1),
        ]:
            if getattr(self, name) < least:
                raise UserError(f"training.{name}", getattr(self, name), f"allowed: {least} or more")
        if self.run_name is not None and (not self.run_name or "/" in self.run_name or self.run_name in (".", "..")):
            raise UserError("training.run_name", self.run_name, "allowed: the name of a folder, without a path")
        for name in ("stall_timeout_s", "pause_timeout_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"training.{name}", getattr(self, name), "allowed: more than 0 seconds")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = 2_000
    """Ticks between two checkpoints; 0 writes only the last one."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Keep the best checkpoint besides the newest ones: by its evaluation, or Train/mean_reward where none is made."""
    replay: bool = True
    """Save each rank's replay, so that a resumed run continues bit for bit."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError("checkpoint.every", self.every, "allowed: 0 or more ticks")
        if self.keep_last < 1:
            raise UserError("checkpoint.keep_last", self.keep_last, "allowed: 1 or more")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """How checkpoints are judged beside the training: deterministic, each by the same episodes."""

    episodes: int = 0
    """Episodes of each evaluation; 0 judges nothing. The best checkpoint is then the one with the best mean return."""
    episode_s: float = 10.0
    """Length of an episode [s], where the task has such a setting."""
    physics: Literal["faithful", "fast"] = "faithful"
    """Physics to judge on, where the task has a choice."""
    seed: int = 1
    """Seed of the episodes."""
    patience_s: float = 300.0
    """Seconds [s] that a completed run waits for its last evaluation."""

    def __post_init__(self) -> None:
        if self.episodes < 0:
            raise UserError("evaluation.episodes", self.episodes, "allowed: 0 or more")
        for name in ("episode_s", "patience_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"evaluation.{name}", getattr(self, name), "allowed: more than 0 seconds")


@dataclass(frozen=True, kw_only=True)
class ClassConfig:
    """A class by name or import path, with its own typed arguments, as the YAML holds it."""

    class_path: str
    init_args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class JobConfig:
    """What every run has, whatever it trains."""

    seed: int = 1
    """Seed of the job; rank r uses seed + r."""
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    ckpt_path: str | None = None
    """Checkpoint to continue from: a folder, or `last` or `best` for that one of the run."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32 - 2**16:
            raise UserError("seed", self.seed, f"allowed: 0 to {2**32 - 2**16 - 1}")


@dataclass(frozen=True, kw_only=True)
class RunConfig(JobConfig):
    """A whole run, resolved: what `config.yaml` in the run folder holds."""

    task: ClassConfig
    learner: ClassConfig
    logger: ClassConfig


Section = Literal["task", "learner", "logger"]
BY_CLASS = "by_class"
"""In a section of a file that is laid over others: arguments for whichever class they name."""
SECTIONS: tuple[Section, ...] = ("task", "learner", "logger")
"""Parts of a run that are a class with its own arguments."""

LEARNERS = {
    "FastSAC": "unilab_fabric.learners.fast_sac.config.FastSAC",
    "FlashSAC": "unilab_fabric.learners.flash_sac.config.FlashSAC",
    "PPO": "unilab_fabric.learners.ppo.config.PPO",
}
"""Short name and import path of each shipped learner's configuration."""

LOGGERS = {
    "CSVLogger": "unilab_fabric.hooks.csv_logger.CSVLogger",
    "CometLogger": "lightning.pytorch.loggers.CometLogger",
    "MLFlowLogger": "lightning.pytorch.loggers.MLFlowLogger",
    "TensorBoardLogger": "lightning.fabric.loggers.TensorBoardLogger",
    "WandbLogger": "lightning.pytorch.loggers.WandbLogger",
}
"""Short name and import path of loggers; any other class of Lightning's interface goes by its import path."""

_DEFAULT_CLASS: Mapping[Section, str] = {"task": "missing", "learner": "FastSAC", "logger": "TensorBoardLogger"}
"""Class of a section that names none; a task must be named."""

_FROM_THE_RANK = frozenset({"num_threads", "seed"})
"""Arguments of our tasks that each rank fills in."""


def resolve_run(tree: Mapping[str, Any]) -> RunConfig:
    """A whole run from nested plain values, defaults filled in.

    `task`, `learner` and `logger` are a name, or a mapping of `class_path` and `init_args`. Raises UserErrors with
    every unknown key, wrong type and refused value.
    """
    problems = Problems()
    rest = {key: value for key, value in tree.items() if key not in SECTIONS}
    siblings = [*argument_types(JobConfig), *SECTIONS]
    for key in sorted(rest.keys() - set(siblings)):
        problems.add(key, shown(rest.pop(key)), suggest(key, siblings, setting_names(tree)))
    settings = check_arguments(JobConfig, rest, "", problems)
    task = resolve_section("task", tree.get("task"), problems)
    learner = resolve_section("learner", tree.get("learner"), problems)
    logger = resolve_section("logger", tree.get("logger"), problems)
    problems.raise_any()
    job: JobConfig = build(JobConfig, settings)
    return RunConfig(**vars(job), task=task, learner=learner, logger=logger)


def resolve_section(section: Section, given: Any, problems: Problems) -> ClassConfig:
    """The class of a section and all its arguments, from a name or a mapping; adds every problem with them."""
    given = {"class_path": given} if isinstance(given, str) else given or {}
    for key in sorted(given.keys() - {"class_path", "init_args"}):
        if key == BY_CLASS and isinstance(given[key], Mapping):
            problems.add(f"{section}.{key}", ", ".join(given[key]), f"allowed where {section} names a class")
            continue
        problems.add(f"{section}.{key}", shown(given[key]), f"the arguments of a class stand under {section}.init_args")
    name, init_args = str(given.get("class_path", _DEFAULT_CLASS[section])), given.get("init_args") or {}
    if not isinstance(init_args, Mapping):
        problems.add(f"{section}.init_args", shown(init_args), "allowed: a mapping")
        init_args = {}
    with problems.gathered():
        name = class_name(section, name)
        if section != "logger":
            cls = section_class(section, name)
            init_args = check_arguments(cls, init_args, section, problems, skip=not_settable(cls))
        elif "." not in name or (not problems.found and (init_args or name not in LOGGERS.values())):
            # last, and only where there is something to check: Lightning takes seconds to load
            cls = section_class(section, name)
            init_args = check_given(cls, init_args, section, problems, others=takes_any_argument(cls))
    return ClassConfig(class_path=name, init_args=dict(init_args))


def class_name(section: Section, name: str) -> str:
    """The one spelling of a class: short for tasks and learners of ours, else the import path."""
    shipped = _shipped(section)
    if section == "logger":
        return shipped.get(name, name)
    return {path: short for short, path in shipped.items()}.get(name, name)


def section_class(section: Section, name: str) -> type:
    """The class that `name` means in a section. Raises UserError for a name that leads nowhere."""
    if section == "task":
        from unilab_fabric.envs.registry import task_class  # Gymnasium is not loaded for `--help`

        return task_class(name)
    path = _shipped(section).get(name, name)
    cls = _imported(section, path)
    if section == "learner":
        from unilab_fabric.learners.learner import LearnerConfig

        if not issubclass(cls, LearnerConfig):
            raise UserError(section, name, f"allowed: {', '.join(LEARNERS)}, or a subclass of LearnerConfig")
    return cls


def setting_names(tree: Mapping[str, Any]) -> list[str]:
    """Dotted names of all settings of a run, those of its task and learner included where these are known."""
    names = argument_names(JobConfig, "")
    for section in ("task", "learner"):
        given = tree.get(section) or {}
        name = given if isinstance(given, str) else given.get("class_path", _DEFAULT_CLASS[section])
        with Problems().gathered():  # a class that is not known is a problem that is told elsewhere
            cls = section_class(section, str(name))
            names += argument_names(cls, section, not_settable(cls))
    return names


def not_settable(cls: type) -> frozenset[str]:
    """Arguments of a class that are not the user's to set."""
    return _FROM_THE_RANK if argument_types(cls).keys() >= _FROM_THE_RANK else frozenset()


def build_learner_config(learner: ClassConfig) -> "LearnerConfig":
    """The learner's own configuration from the resolved one."""
    settings: LearnerConfig = build(section_class("learner", learner.class_path), learner.init_args)
    return settings


def of_each_rank(config: RunConfig, world_size: int) -> RunConfig:
    """The run with the sizes of one rank: those of the job divided, where `training.batch` is job.

    Raises UserErrors where ranks would get unequal shares.
    """
    if config.training.batch == "per_rank" or world_size == 1:
        return config
    problems = Problems()
    learner = section_class("learner", config.learner.class_path)
    task = _divided("task", config.task, ("num_envs",), world_size, problems)
    shared: tuple[str, ...] = learner.job_sizes  # type: ignore[attr-defined]
    divided = _divided("learner", config.learner, shared, world_size, problems)
    problems.raise_any()
    return replace(config, task=task, learner=divided)


def _divided(
    section: str, of_job: ClassConfig, names: Iterable[str], world_size: int, problems: Problems
) -> ClassConfig:
    sizes = {name: size for name in names if isinstance(size := of_job.init_args.get(name), int)}
    for name, size in sizes.items():
        if size % world_size:
            told = f"training.batch is job; allowed: a multiple of {world_size}, the number of ranks"
            problems.add(f"{section}.{name}", size, told)
    return replace(of_job, init_args={**of_job.init_args, **{name: n // world_size for name, n in sizes.items()}})


def to_plain(config: RunConfig) -> dict[str, Any]:
    """The run as nested plain values, as YAML and JSON hold them."""
    return asdict(config)


def dump_run_config(config: RunConfig) -> str:
    """The run as YAML that `load_run_config` reads back to an equal object."""
    text: str = yaml.safe_dump(to_plain(config), sort_keys=False, width=120)
    return text


def save_run_config(config: RunConfig, path: Path) -> None:
    """Writes the run's `config.yaml`."""
    path.write_text(dump_run_config(config))


def load_run_config(path: Path) -> RunConfig:
    """Reads a run's `config.yaml`. Raises UserErrors where it does not fit this version."""
    return resolve_run(read_config_file(path))


def read_config_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises UserError where it cannot be read or is something else."""
    try:
        tree = read_yaml(path.read_text())
    except OSError as error:
        raise UserError("config", path, f"it cannot be read: {error.strerror}") from None
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise UserError("config", path, f"line {line} is not YAML: {error.problem}") from None
    if tree is not None and not isinstance(tree, dict):
        raise UserError("config", path, "allowed: a YAML file of the form `key: value`")
    return tree or {}


def _shipped(section: Section) -> Mapping[str, str]:
    if section == "task":
        from unilab_fabric.envs.registry import TASKS

        return TASKS
    return LEARNERS if section == "learner" else LOGGERS


def _imported(section: Section, path: str) -> type:
    module_path, _, name = path.rpartition(".")
    if not module_path:
        raise UserError(section, path, nearest(path, [*_shipped(section), "an import path"]))
    try:
        module = importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_path}.".startswith(f"{error.name}."):
            raise  # the module is there; something it imports is not
        raise UserError(section, path, f"there is no module {error.name}") from None
    classes = {known: value for known, value in vars(module).items() if isinstance(value, type)}
    if name not in classes:
        raise UserError(section, path, f"{module_path} has no such class; {nearest(name, classes)}")
    cls: type = classes[name]
    return cls
