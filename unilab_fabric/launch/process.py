"""One rank as a process, from its start to its end: signals, collector, training, and a report of how it ended.

No torch at the top: the collector starts while its rank is still loading it.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from unilab_fabric import STARTED_AT
from unilab_fabric.checkpoints import envs_to_resume, sweep
from unilab_fabric.config import RunConfig, load_run_config, of_each_rank
from unilab_fabric.launch.devices import Topology, load_topology
from unilab_fabric.launch.failure import FailedAt, Failure, failure_of, record, show
from unilab_fabric.launch.preflight import library_variables, without_graphics
from unilab_fabric.launch.signals import StopSignals
from unilab_fabric.launch.supervisor import Report
from unilab_fabric.lifeline import die_with_parent
from unilab_fabric.loop.collector import Collector, CollectorConfig

CONFIG = "config.yaml"
_SAME_SIGNAL_S = 2.0
_FILM_S = 300.0
_PLAY = """
import sys
from unilab_fabric.lifeline import die_with_parent
die_with_parent(int(sys.argv[1]))
from unilab_fabric.cli import main
sys.exit(main(["play", "--ckpt_path", sys.argv[2]]))
"""


def main(argv: Sequence[str]) -> int:
    """A rank that our launcher started, with the arguments that `rank_command` lists."""
    launcher, folder, pipe, started_at, topology = argv
    die_with_parent(int(launcher))
    with without_graphics():
        config = load_run_config(Path(folder) / CONFIG)
    return run_rank(
        config,
        load_topology(topology, local_rank=int(os.environ["LOCAL_RANK"])),
        Path(folder),
        Report(int(pipe)),
        started_at=float(started_at),
        same_signal_s=_SAME_SIGNAL_S,
    )


def rank_command(folder: Path, pipe: int, topology: Topology) -> list[str]:
    """The command of a rank, for its launcher, which is this process.

    The topology comes along as it was decided once: a rank, held to its own cores, could not decide it again.
    """
    arguments = [os.getpid(), folder, pipe, STARTED_AT, topology.dump()]
    return [sys.executable, "-m", __spec__.name, *map(str, arguments)]


def run_external_rank(config: RunConfig, topology: Topology, folder: Path) -> int:
    """A rank that torchrun, SLURM or MPI has started and watches."""
    die_with_parent(os.getppid())  # it may be killed without a word to its ranks
    return run_rank(config, topology, folder, same_signal_s=_SAME_SIGNAL_S)


def run_rank(
    config: RunConfig,
    topology: Topology,
    folder: Path,
    report: Report | None = None,
    *,
    started_at: float = STARTED_AT,
    same_signal_s: float = 0.0,
) -> int:
    """Trains; returns the exit status, 0 or 128 plus a signal's number. A failure ends the process here.

    `report` goes to our launcher, if there is one; without it the rank records and shows its own failure. For the
    other two see `train_rank` and `StopSignals`.
    """
    if topology.pinned:  # before there is a second thread, as each one keeps the mask it was started with
        os.sched_setaffinity(0, topology.learner_cpus[topology.local_rank])
    signals = StopSignals(lambda number: report.done(128 + number) if report else None, same_s=same_signal_s)
    os.environ.update(library_variables(topology, config.training.deterministic))  # read when torch is loaded
    collector = None
    try:
        collector = _start_collector(config, topology)
        from unilab_fabric.launch.rank import train_rank

        status = train_rank(config, topology, folder, collector, signals, started_at)
    except Exception as error:  # the end of this rank, whatever it was
        failure = failure_of(error, topology.rank)
        if report is not None:
            report.failed(failure)  # first of all, so that it is taken for the cause of what follows
        if isinstance(error, FailedAt):
            error.end_hooks()
            folder = error.folder
        if collector is not None:
            collector.close()
        _leave(failure, folder, told=report is not None)
    collector.close()
    from unilab_fabric.launch.strategy import close_fabric

    close_fabric()
    if config.training.play_after and topology.rank == 0 and status == 0:
        _film(folder)
    if report is not None:
        report.done(status)
    return status


def _film(folder: Path) -> None:
    """A film of the newest checkpoint, by a process of its own: graphics that fail must not fail a run."""
    command = [sys.executable, "-c", _PLAY, str(os.getpid()), str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FILM_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"warning: no film was made within {_FILM_S:.0f} s", file=sys.stderr)
        return
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    told = said[-1] if said else f"play ended with status {done.returncode}"
    print(told if done.returncode == 0 else f"warning: no film was made: {told}", file=sys.stderr, flush=True)


def _leave(failure: Failure, folder: Path, *, told: bool) -> NoReturn:
    """Ends the process without its exit handlers: a collective under way, or a graph, would hold them up for ever."""
    if not told:
        if folder.is_dir() and not failure.consequence:
            sweep(folder)  # a checkpoint that could not be finished may hold the last free bytes of the disk
            record(failure, folder)
        show(failure)
    elif failure.rank > 0:
        show(failure)  # into its log; what belongs on the terminal is the launcher's to choose
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(failure.exit_status)


def _start_collector(config: RunConfig, topology: Topology) -> Collector:
    state = None
    if config.ckpt_path:
        state = envs_to_resume(Path(config.ckpt_path), rank=topology.rank, world_size=topology.world_size)
    settings = CollectorConfig(
        class_path=config.task.class_path,
        init_args=of_each_rank(config, topology.world_size).task.init_args,
        seed=config.seed + topology.rank,
        num_threads=topology.physics_threads,
        cpus=topology.collector_cpus[topology.local_rank] if topology.pinned else None,
        state_file=None if state is None else str(state),
    )
    return Collector(settings, rank=topology.rank, deadline_s=config.training.stall_timeout_s)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
