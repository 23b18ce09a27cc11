"""`fit`, from a checked plan to an exit status: the launcher of several ranks, or the one rank itself.

The launcher never loads torch.
"""

import fcntl
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

from unilab_fabric.checkpoints import sweep
from unilab_fabric.config import RunConfig, save_run_config
from unilab_fabric.errors import UserError
from unilab_fabric.launch import process
from unilab_fabric.launch.devices import Topology
from unilab_fabric.launch.failure import Failure, forget, record, show
from unilab_fabric.launch.preflight import Plan, banner, library_variables
from unilab_fabric.launch.supervisor import Supervisor

_LOCK = ".lock"


def run_job(config: RunConfig, plan: Plan) -> int:
    """Trains; returns the exit status: 0, 130 or 143 after a signal, else that of the process that failed first.

    Raises UserError where another job writes to the run folder.
    """
    topology = plan.topology
    if topology.rank > 0:  # another program starts the ranks, and rank 0 decides on the folder
        return process.run_external_rank(config, topology, plan.run_folder)
    folder, lock = claim_run_folder(plan.run_folder, own_name=config.training.run_name is None)
    with lock:
        forget(folder)
        sweep(folder)
        save_run_config(config, folder / process.CONFIG)
        print(banner(replace(plan, run_folder=folder)), file=sys.stderr, flush=True)
        if topology.started_by != "us":
            return process.run_external_rank(config, topology, folder)
        if topology.world_size == 1:
            return process.run_rank(config, topology, folder)
        return _launch(config, topology, folder)


def claim_run_folder(folder: Path, *, own_name: bool) -> tuple[Path, IO[str]]:
    """Makes the run folder and locks it for as long as the returned file is open.

    With a name of our own, another one is taken where another job was quicker. Raises UserError where another job
    holds the folder.
    """
    number = 1
    claimed = folder
    while own_name:
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


def _launch(config: RunConfig, topology: Topology, folder: Path) -> int:
    """All ranks of this machine, each a process of its own."""
    with socket.socket() as port:  # bound for as long as the job runs, so that no other program is given it
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # and rank 0 may listen there all the same
        port.bind(("127.0.0.1", 0))
        libraries = library_variables(topology, config.training.deterministic)
        environments = rank_environments(topology, os.environ, port.getsockname()[1])
        supervisor = Supervisor(
            lambda pipe: process.rank_command(folder, pipe, topology),
            {rank: {**os.environ, **libraries, **environment} for rank, environment in environments.items()},
            topology.learner_cpus if topology.pinned else None,
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
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    if "GLOO_SOCKET_IFNAME" not in inherited:  # one machine: no need to ask what its name resolves to
        job["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return {rank: job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(topology.world_size)}
