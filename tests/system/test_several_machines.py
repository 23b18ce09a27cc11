"""Jobs whose ranks another program starts: torchrun, and processes with the variables of SLURM and MPI, on loopback."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.system.jobs import ENDLESS, SMALL, alive, command, environment, working_in
from unilab_fabric.checkpoints import read_manifest, verify, whole_checkpoints

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
ROOT = Path(__file__).parents[2]
LENGTH = "--training.max_env_steps=3200"
FIT = ["-m", "unilab_fabric", "fit", *[word for word in SMALL if "run_name" not in word]]


class Cluster:
    """Several commands in one folder, as on machines with a shared disk; none of them outlives the test."""

    def __init__(self, folder):
        self.folder = folder
        self.commands = []

    def start(self, *words, folder=None, **variables):
        output = self.folder / f"output {len(self.commands)}.txt"
        with output.open("ab") as file:
            self.commands.append(
                subprocess.Popen(
                    [sys.executable, *words],
                    cwd=folder or self.folder,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **variables},
                    start_new_session=True,
                )
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in {process.pid for process in self.commands} | working_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.commands:
            process.wait(10)

    def statuses(self, within_s=90):
        deadline = time.monotonic() + within_s
        return [process.wait(max(0, deadline - time.monotonic())) for process in self.commands]

    def text(self):
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.folder.glob("output *.txt")))

    def run(self):
        """The one run folder."""
        (folder,) = (self.folder / "runs").iterdir()
        return folder

    def wait_for(self, condition, within_s=60):
        deadline = time.monotonic() + within_s
        while not condition():
            assert all(process.poll() is None for process in self.commands), self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def training(self):
        """Once a checkpoint is there: process ids of the ranks, by rank."""
        self.wait_for(lambda: (self.folder / "runs").is_dir() and whole_checkpoints(self.run()))
        return {int(environment(pid)["RANK"]): pid for pid in working_in(self.folder) if is_rank(pid)}

    def all_gone(self, within_s):
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for process in self.commands:
                process.poll()
            if not alive(working_in(self.folder) | {process.pid for process in self.commands}):
                return True
            time.sleep(0.05)
        return False


def is_rank(pid):
    words = command(pid)
    return "fit" in words and "torch.distributed.run" not in words and "RANK" in environment(pid)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def cluster(tmp_path):
    with Cluster(tmp_path) as cluster:
        yield cluster


def torchrun(cluster, nodes, ranks, *arguments):
    """One agent for each node."""
    port = free_port()
    for node in range(nodes):
        rendezvous = [f"--nnodes={nodes}", f"--node_rank={node}", f"--nproc_per_node={ranks}"]
        address = ["--master_addr=127.0.0.1", f"--master_port={port}"]
        job = [f"--devices={ranks}", f"--training.num_nodes={nodes}", *arguments]
        cluster.start("-m", "torch.distributed.run", *rendezvous, *address, *FIT, *job)


def assert_one_run_of(cluster, world_size, num_nodes, started_by):
    """One folder, one writer, and as many ranks as there should be."""
    run = cluster.run()
    summary = json.loads((run / "run_summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["world_size"] == world_size == len(summary["ranks"])
    assert summary["seeds"] == list(range(1, world_size + 1))
    assert summary["env_steps"] == 3200
    assert [rank["env_steps"] for rank in summary["ranks"]] == [3200 // world_size] * world_size
    assert summary["topology"]["num_nodes"] == num_nodes
    assert summary["topology"]["started_by"] == started_by
    assert len(list(run.glob("events.out.tfevents*"))) == 1
    assert cluster.text().count("unilab_fabric 0.") == 1  # one banner
    (checkpoint,) = whole_checkpoints(run)
    verify(checkpoint)
    files = read_manifest(checkpoint)["files"]
    assert {f"rank-{rank}.pt" for rank in range(world_size)} < files.keys()


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (2, 2)])
def test_torchrun_on_two_machines_is_one_job(cluster, nodes, ranks):
    torchrun(cluster, nodes, ranks, LENGTH)
    assert cluster.statuses() == [0] * nodes, cluster.text()
    assert_one_run_of(cluster, nodes * ranks, nodes, "torchrun")
    assert f"{nodes} machines, {ranks} each on the CPU, started by torchrun; gloo" in cluster.text()


def test_a_rank_killed_on_one_machine_ends_the_job_on_both(cluster):
    torchrun(cluster, 2, 1, ENDLESS, "--checkpoint.every=20")
    ranks = cluster.training()
    os.kill(ranks[1], signal.SIGKILL)
    assert cluster.all_gone(20), cluster.text()
    assert all(status != 0 for status in cluster.statuses())
    assert "could not finish" in cluster.text()
    verify(whole_checkpoints(cluster.run())[-1])


def test_a_machine_that_is_gone_ends_the_job_on_the_other(cluster):
    torchrun(cluster, 2, 1, ENDLESS, "--checkpoint.every=20")
    cluster.training()
    os.kill(cluster.commands[1].pid, signal.SIGKILL)  # its rank and collector go with it
    assert cluster.all_gone(20), cluster.text()
    verify(whole_checkpoints(cluster.run())[-1])


def test_a_collector_that_is_gone_ends_the_job_on_both_machines(cluster):
    torchrun(cluster, 2, 1, ENDLESS, "--checkpoint.every=20")
    cluster.training()
    collectors = [pid for pid in working_in(cluster.folder) if "unilab_fabric.loop.collector" in command(pid)]
    assert len(collectors) == 2
    os.kill(collectors[0], signal.SIGKILL)
    assert cluster.all_gone(20), cluster.text()
    failure = json.loads((cluster.run() / "failure.json").read_text())
    assert failure["process"] == "collector"
    assert failure["signal"] == "SIGKILL"


def test_one_agent_that_is_asked_to_end_stops_all_ranks_with_a_checkpoint(cluster):
    torchrun(cluster, 2, 1, ENDLESS, "--checkpoint.every=20")
    cluster.training()
    os.kill(cluster.commands[1].pid, signal.SIGTERM)
    assert cluster.all_gone(40), cluster.text()
    summary = json.loads((cluster.run() / "run_summary.json").read_text())
    assert summary["status"] == "stopped"
    newest = whole_checkpoints(cluster.run())[-1]
    assert newest.name == f"tick-{summary['ticks']:09d}"
    verify(newest)
    assert not (cluster.run() / "failure.json").exists()


def test_machines_that_share_no_disk_are_refused(cluster, tmp_path):
    elsewhere = tmp_path / "another disk"
    elsewhere.mkdir()
    port = free_port()
    for node, folder in enumerate((tmp_path, elsewhere)):
        agent = ["-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={node}", "--nproc_per_node=1"]
        address = ["--master_addr=127.0.0.1", f"--master_port={port}"]
        cluster.start(*agent, *address, *FIT, "--devices=1", "--training.num_nodes=2", LENGTH, folder=folder)
    assert all(cluster.statuses())
    (line,) = (line for line in cluster.text().splitlines() if line.startswith("error: training.log_root"))
    assert "rank 1 on " in line
    assert line.endswith("which rank 0 has made; allowed: a folder that all machines share")


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (1, 2)])
def test_tasks_of_slurm_are_one_job(cluster, nodes, ranks):
    port = str(free_port())
    for task in range(nodes * ranks):
        cluster.start(
            *FIT,
            f"--devices={ranks}",
            f"--training.num_nodes={nodes}",
            LENGTH,
            SLURM_JOB_ID="4711",
            SLURM_JOB_NAME="walk",
            SLURM_NTASKS=str(nodes * ranks),
            SLURM_NTASKS_PER_NODE=str(ranks),
            SLURM_NNODES=str(nodes),
            SLURM_NODELIST="127.0.0.1",
            SLURM_PROCID=str(task),
            SLURM_NODEID=str(task // ranks),
            SLURM_LOCALID=str(task % ranks),
            MASTER_PORT=port,
        )
    assert cluster.statuses() == [0] * nodes * ranks, cluster.text()
    assert_one_run_of(cluster, nodes * ranks, nodes, "slurm")


STUB = '''
"""Just as much of mpi4py as Lightning asks for, on one machine whose name resolves."""
import os
import socket

RANK, SIZE = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
LOCAL = int(os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
socket.gethostname = lambda: f"node{RANK // LOCAL}"

class Comm:
    def __init__(self, rank, size): self._rank, self._size = rank, size
    def Get_rank(self): return self._rank
    def Get_size(self): return self._size
    def gather(self, value, root): return [f"node{rank // LOCAL}" for rank in range(SIZE)] if RANK == root else None
    def bcast(self, value, root):
        if isinstance(value, int): return int(os.environ["STUB_PORT"])
        if isinstance(value, str): return "127.0.0.1"
        return [f"node{node}" for node in range(SIZE // LOCAL)]
    def Split(self, color): return Comm(RANK % LOCAL, LOCAL)

class MPI:
    COMM_WORLD = Comm(RANK, SIZE)
    Comm = Comm
'''


@pytest.mark.parametrize(("nodes", "ranks"), [(2, 1), (1, 2)])
def test_processes_of_mpi_are_one_job(cluster, tmp_path, nodes, ranks):
    (tmp_path / "stub").mkdir()
    (tmp_path / "stub" / "mpi4py.py").write_text(STUB)
    port = str(free_port())
    for rank in range(nodes * ranks):
        cluster.start(
            *FIT,
            f"--devices={ranks}",
            f"--training.num_nodes={nodes}",
            LENGTH,
            OMPI_COMM_WORLD_SIZE=str(nodes * ranks),
            OMPI_COMM_WORLD_RANK=str(rank),
            OMPI_COMM_WORLD_LOCAL_SIZE=str(ranks),
            OMPI_COMM_WORLD_LOCAL_RANK=str(rank % ranks),
            STUB_PORT=port,
            PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path / "stub")]),
        )
    assert cluster.statuses() == [0] * nodes * ranks, cluster.text()
    assert_one_run_of(cluster, nodes * ranks, nodes, "mpi")


def test_four_jobs_that_start_at_once_do_not_collide(cluster):
    for devices in (2, 1, 2, 1):
        cluster.start(*FIT, f"--devices={devices}", "--training.max_env_steps=800")
    assert cluster.statuses() == [0] * 4, cluster.text()
    runs = list((cluster.folder / "runs").iterdir())
    summaries = [json.loads((run / "run_summary.json").read_text()) for run in runs]
    assert sorted(summary["world_size"] for summary in summaries) == [1, 1, 2, 2]
    assert all(summary["status"] == "completed" and summary["env_steps"] == 800 for summary in summaries)
