"""`fit`, from a checked plan to an exit status: starts the other ranks and the collector, then becomes rank 0.

No torch at the top: ranks and collectors start while rank 0 is still loading it.
"""

import json
import os
import socket
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from unilab_fabric.checkpoints import envs_to_resume
from unilab_fabric.config import RunConfig, load_run_config, save_run_config
from unilab_fabric.errors import PeerLost
from unilab_fabric.launch.devices import LAUNCHER_VARIABLE, Topology, resolve_topology
from unilab_fabric.launch.preflight import Plan, banner, library_variables
from unilab_fabric.launch.supervisor import RankFailed, Supervisor
from unilab_fabric.lifeline import die_with_parent
from unilab_fabric.offpolicy.collector import Collector, CollectorConfig

CONFIG = "config.yaml"
FAILURE = "failure.json"
_PEER_GRACE_S = 2.0
"""Seconds [s] rank 0 looks for another rank's failure before it takes its own for the first one."""


def run_job(config: RunConfig, plan: Plan) -> int:
    """Trains; returns the exit status: 0, 130 or 143 after a signal, else that of the rank that failed first."""
    topology, folder = plan.topology, plan.run_folder
    if topology.started_by != "us":  # torchrun and its like may be killed without a word to their ranks
        die_with_parent(os.getppid())
    environment = rank_environment(topology, os.environ)
    os.environ.update(environment.get(topology.rank, {}))
    if topology.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
        save_run_config(config, folder / CONFIG)
        (folder / FAILURE).unlink(missing_ok=True)
        print(banner(plan), file=sys.stderr, flush=True)
    others = [rank for rank in environment if rank != topology.rank]
    command = [sys.executable, "-m", __name__, str(folder)]
    with_ours = {rank: {**os.environ, **environment[rank]} for rank in others}
    supervisor = Supervisor(dict.fromkeys(others, command), with_ours, folder)
    return _run_rank(config, topology, folder, supervisor)


def rank_environment(topology: Topology, inherited: Mapping[str, str]) -> dict[int, dict[str, str]]:
    """Variables of each rank that we start, this one included; empty where there is one rank or others start them."""
    if topology.world_size == 1 or topology.started_by != "us":
        return {}
    job = {
        LAUNCHER_VARIABLE: str(os.getpid()),
        "WORLD_SIZE": str(topology.world_size),
        "LOCAL_WORLD_SIZE": str(topology.world_size),
        "NODE_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    if "GLOO_SOCKET_IFNAME" not in inherited:  # one machine: no need to ask what its name resolves to
        job["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return {rank: job | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(topology.world_size)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _run_rank(config: RunConfig, topology: Topology, folder: Path, supervisor: Supervisor) -> int:
    """One rank from start to end, its collector with it."""
    from unilab_fabric import STARTED_AT

    if topology.pinned:
        os.sched_setaffinity(0, topology.learner_cpus[topology.local_rank])
    os.environ.update(library_variables(topology, config.training.deterministic))  # read when torch is loaded
    collector = Collector(
        _collector_config(config, topology), rank=topology.rank, deadline_s=config.training.stall_timeout_s
    )
    try:
        from unilab_fabric.launch.rank import train_rank

        supervisor.watch(lambda failure: _record_failure(folder, failure))
        status = train_rank(config, topology, folder, collector, STARTED_AT)
        supervisor.wait()
    except RankFailed as failure:  # a rank that failed after rank 0 had ended well
        _record_failure(folder, failure)
        return failure.status
    except Exception as error:  # the end of this rank, whatever it was: told once, in full, and recorded
        other = supervisor.failure(_PEER_GRACE_S) if isinstance(error, PeerLost) else None
        supervisor.stop_watching()
        if other:
            _record_failure(folder, other)
            return other.status
        traceback.print_exc()
        if topology.rank == 0:
            _write_failure(folder, {"rank": 0, "reason": str(error), "traceback": traceback.format_exc()}, status=1)
        return 1
    finally:
        collector.close()
        supervisor.end()
        if "torch" in sys.modules:
            from unilab_fabric.launch.strategy import close_fabric

            close_fabric()  # after the failure has been recorded, as the other ranks fail by this
    return status


def _collector_config(config: RunConfig, topology: Topology) -> CollectorConfig:
    state = None
    if config.ckpt_path:
        state = envs_to_resume(Path(config.ckpt_path), rank=topology.rank, world_size=topology.world_size)
    return CollectorConfig(
        class_path=config.task.class_path,
        init_args=config.task.init_args,
        seed=config.seed + topology.rank,
        num_threads=topology.physics_threads,
        cpus=topology.collector_cpus[topology.local_rank] if topology.pinned else None,
        state_file=None if state is None else str(state),
    )


def _record_failure(folder: Path, failure: RankFailed) -> None:
    print(f"error: {failure}", file=sys.stderr, flush=True)
    _write_failure(folder, {"rank": failure.rank, "reason": str(failure)}, status=failure.status)


def _write_failure(folder: Path, record: Mapping[str, object], status: int) -> None:
    text = json.dumps({"status": "failed", "exit_status": status, "time": time.time(), **record}, indent=2)
    (folder / FAILURE).write_text(text + "\n")


def main(argv: Sequence[str]) -> int:
    """A rank above 0 that `run_job` started, in the run folder that `argv` names."""
    die_with_parent(int(os.environ[LAUNCHER_VARIABLE]))
    folder = Path(argv[0])
    config = load_run_config(folder / CONFIG)
    return _run_rank(config, resolve_topology(config.training), folder, Supervisor({}, {}, folder))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
