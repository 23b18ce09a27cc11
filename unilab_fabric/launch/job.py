"""`fit`, from a checked plan to an exit status: the launcher of several ranks, or the one rank itself.

No torch at the top: the launcher never loads it, and a collector starts while its rank is still loading it.
"""

import fcntl
import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO, NoReturn

from unilab_fabric import STARTED_AT
from unilab_fabric.checkpoints import envs_to_resume, sweep
from unilab_fabric.config import RunConfig, load_run_config, save_run_config
from unilab_fabric.errors import UserError
from unilab_fabric.launch.devices import LAUNCHER_VARIABLE, Topology, resolve_topology
from unilab_fabric.launch.failure import FailedAt, Failure, failure_of, forget, record, show
from unilab_fabric.launch.preflight import Plan, banner, library_variables
from unilab_fabric.launch.signals import StopSignals
from unilab_fabric.launch.supervisor import Report, Supervisor
from unilab_fabric.lifeline import die_with_parent
from unilab_fabric.offpolicy.collector import NONFINITE, Collector, CollectorConfig

CONFIG = "config.yaml"
_LOCK = ".lock"
_SAME_SIGNAL_S = 2.0


def run_job(config: RunConfig, plan: Plan) -> int:
    """Trains; returns the exit status: 0, 130 or 143 after a signal, else that of the process that failed first.

    Raises UserError where another job writes to the run folder.
    """
    topology = plan.topology
    if topology.rank > 0:  # another program starts the ranks, and rank 0 decides on the folder
        return _run_external_rank(config, topology, plan.run_folder)
    folder, lock = claim_run_folder(plan.run_folder, own_name=config.training.run_name is None)
    with lock:
        forget(folder)
        sweep(folder)
        save_run_config(config, folder / CONFIG)
        print(banner(replace(plan, run_folder=folder)), file=sys.stderr, flush=True)
        if topology.started_by != "us":
            return _run_external_rank(config, topology, folder)
        if topology.world_size == 1:
            return _run_rank(config, topology, folder, _tell_here, started_at=STARTED_AT)
        return _launch(config, topology, folder)


def claim_run_folder(folder: Path, *, own_name: bool) -> tuple[Path, IO[str]]:
    """Makes the run folder and locks it for as long as the returned file is open.

    With a name of our own, another one is taken where another job was quicker. Raises UserError where another job
    holds the folder.
    """
    number = 1
    claimed = folder
    while own_name and not folder.exists():
        try:
            claimed.mkdir(parents=True)
            break
        except FileExistsError:
            number += 1
            claimed = folder.with_name(f"{folder.name}-{number}")
    claimed.mkdir(parents=True, exist_ok=True)
    lock = (claimed / _LOCK).open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.seek(0)
        raise UserError(
            "training.run_name", claimed.name, f"{claimed} belongs to a running job, {lock.read()}"
        ) from None
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}")
    lock.flush()
    return claimed, lock


# ---- the launcher -----------------------------------------------------------------------------------------------


def _launch(config: RunConfig, topology: Topology, folder: Path) -> int:
    """All ranks of this machine, each a process of its own."""
    with socket.socket() as port:  # bound for as long as the job runs, so that no other program is given it
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # and rank 0 may listen there all the same
        port.bind(("127.0.0.1", 0))
        environments = rank_environments(topology, os.environ, port.getsockname()[1])
        supervisor = Supervisor(
            lambda pipe: [sys.executable, "-m", __name__, str(folder), str(pipe), str(STARTED_AT)],
            {rank: {**os.environ, **environment} for rank, environment in environments.items()},
            folder,
            config.training.stall_timeout_s,
        )
        outcome = supervisor.run()
    if isinstance(outcome, Failure):
        sweep(folder)  # a checkpoint that could not be finished may hold the last free bytes of the disk
        record(outcome, folder)
        print(file=sys.stderr)  # a rank that was killed has left its progress bar without an end of line
        show(outcome)
        return outcome.exit_status
    return outcome


def rank_environments(topology: Topology, inherited: Mapping[str, str], port: int) -> dict[int, dict[str, str]]:
    """The variables that each rank is given."""
    job = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if "GLOO_SOCKET_IFNAME" not in inherited:  # one machine: no need to ask what its name resolves to
        job["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return {rank: job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(topology.world_size)}


def main(argv: Sequence[str]) -> int:
    """A rank that `_launch` started, in the run folder, with the pipe and since the time that `argv` names."""
    die_with_parent(int(os.environ[LAUNCHER_VARIABLE]))
    folder, report = Path(argv[0]), Report(int(argv[1]))
    config = load_run_config(folder / CONFIG)

    def tell(outcome: int | Failure, _: Path) -> None:
        if isinstance(outcome, int):
            report.done(outcome)
            return
        report.failed(outcome)
        if outcome.rank > 0:
            show(outcome)  # into its log; what belongs on the terminal is the launcher's to choose

    topology = resolve_topology(config.training)
    return _run_rank(config, topology, folder, tell, started_at=float(argv[2]), same_signal_s=_SAME_SIGNAL_S)


# ---- a rank -----------------------------------------------------------------------------------------------------

Tell = Callable[[int | Failure, Path], None]
"""Hands on how a rank ended, an exit status in good order or its failure, and in which run folder."""


def _run_external_rank(config: RunConfig, topology: Topology, folder: Path) -> int:
    """A rank that torchrun, SLURM or MPI has started and watches."""
    die_with_parent(os.getppid())  # it may be killed without a word to its ranks
    return _run_rank(config, topology, folder, _tell_here, started_at=STARTED_AT, same_signal_s=_SAME_SIGNAL_S)


def _tell_here(outcome: int | Failure, folder: Path) -> None:
    """For a rank without a launcher of ours: it records and shows its own failure."""
    if isinstance(outcome, Failure):
        if folder.is_dir() and not outcome.consequence:
            record(outcome, folder)
        show(outcome)


def _run_rank(
    config: RunConfig, topology: Topology, folder: Path, tell: Tell, *, started_at: float, same_signal_s: float = 0.0
) -> int:
    """One rank from start to end, its collector with it; a failure ends the process here."""
    signals = StopSignals(lambda number: tell(128 + number, folder), same_s=same_signal_s)
    if topology.pinned:
        os.sched_setaffinity(0, topology.learner_cpus[topology.local_rank])
    os.environ.update(library_variables(topology, config.training.deterministic))  # read when torch is loaded
    try:
        with closing(_start_collector(config, topology, folder)) as collector:
            from unilab_fabric.launch.rank import train_rank

            status = train_rank(config, topology, folder, collector, signals, started_at)
    except Exception as error:  # the end of this rank, whatever it was: told once, in full
        failure = failure_of(error, topology.rank)
        tell(failure, error.folder if isinstance(error, FailedAt) else folder)
        _end_now(failure.exit_status)
    from unilab_fabric.launch.strategy import close_fabric

    close_fabric()
    tell(status, folder)
    return status


def _end_now(status: int) -> NoReturn:
    """Ends the process without its exit handlers: a collective under way, or a graph, would hold them up for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _start_collector(config: RunConfig, topology: Topology, folder: Path) -> Collector:
    state = None
    if config.ckpt_path:
        state = envs_to_resume(Path(config.ckpt_path), rank=topology.rank, world_size=topology.world_size)
    settings = CollectorConfig(
        class_path=config.task.class_path,
        init_args=config.task.init_args,
        seed=config.seed + topology.rank,
        num_threads=topology.physics_threads,
        cpus=topology.collector_cpus[topology.local_rank] if topology.pinned else None,
        state_file=None if state is None else str(state),
        rank=topology.rank,
        nonfinite_folder=str(folder / NONFINITE),
    )
    return Collector(settings, rank=topology.rank, deadline_s=config.training.stall_timeout_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
