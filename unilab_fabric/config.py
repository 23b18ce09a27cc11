"""The typed configuration of a run; a learner's and a task's own settings stand beside them.

Loads neither torch nor Lightning: the command line must answer within a second.
"""

from dataclasses import dataclass, field
from typing import Literal

from unilab_fabric.errors import UserError


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """How a job runs. Values are for the whole job unless they say "per rank"."""

    accelerator: Literal["auto", "cpu", "cuda"] = "auto"
    """Device kind; auto takes CUDA devices where there are any, else the CPU."""
    devices: int | list[int] | Literal["auto"] | None = None
    """Devices of each machine, one rank on each: null, [], [0] or 1 for one rank, n for the first n, a list for
    those visible devices in that order, auto for all of them. On the CPU n is the number of processes."""
    num_nodes: int = 1
    """Machines in the job; more than one needs torchrun, SLURM or MPI to start the processes."""
    precision: Literal["auto", "32-true", "bf16-mixed"] = "auto"
    """Arithmetic of forward and backward passes; parameters stay float32. auto takes bf16-mixed where the device has
    fast bf16 instructions, else 32-true."""
    max_env_steps: int = 2_000_000
    """Environment steps of the job, all ranks together; the run ends at the first tick that reaches it."""
    log_root: str = "runs"
    """Folder that holds the run folders."""
    run_name: str | None = None
    """Name of the run folder; null makes one from the task, the learner and the time."""
    log_every: int = 50
    """Ticks between two reports of metrics."""
    replica_check_every: int = 500
    """Ticks between two comparisons of the replicated state of all ranks; 0 never compares."""
    collector_cpus: list[list[int]] | None = None
    """CPU cores of each rank's collector, one list per rank of this machine; null splits the allowed cores."""
    deterministic: bool = True
    """Refuse torch operations without a deterministic implementation, so that a run on the CPU repeats bit for bit."""
    stall_timeout_s: float = 120.0
    """Seconds [s] a rank waits for its collector or for another rank before the job ends with an error."""

    def __post_init__(self) -> None:
        for name, least in [("max_env_steps", 1), ("num_nodes", 1), ("log_every", 1), ("replica_check_every", 0)]:
            if getattr(self, name) < least:
                raise UserError(f"training.{name}", getattr(self, name), f"allowed: {least} or more")
        if not self.stall_timeout_s > 0:
            raise UserError("training.stall_timeout_s", self.stall_timeout_s, "allowed: more than 0 seconds")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written and which are kept."""

    every: int = 2_000
    """Ticks between two checkpoints; 0 writes only the last one."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_best: bool = True
    """Keep the checkpoint with the best Train/mean_reward besides the newest ones."""
    replay: bool = True
    """Save each rank's replay, so that a resumed run continues bit for bit."""

    def __post_init__(self) -> None:
        if self.every < 0:
            raise UserError("checkpoint.every", self.every, "allowed: 0 or more ticks")
        if self.keep_last < 1:
            raise UserError("checkpoint.keep_last", self.keep_last, "allowed: 1 or more")


@dataclass(frozen=True, kw_only=True)
class ClassConfig:
    """A class by name or import path, with its own typed arguments, as the YAML holds it."""

    class_path: str
    init_args: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """A whole run, resolved: what `config.yaml` in the run folder holds."""

    seed: int = 1
    """Seed of the job; rank r uses seed + r."""
    training: TrainingConfig = TrainingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    task: ClassConfig
    learner: ClassConfig
    logger: ClassConfig
    ckpt_path: str | None = None
    """Checkpoint to continue from: a folder, or `last` for the newest whole one of the run."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**32 - 2**16:
            raise UserError("seed", self.seed, f"allowed: 0 to {2**32 - 2**16 - 1}")
