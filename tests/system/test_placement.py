"""Where the processes of a real job run, and with how many threads, as the system sees them."""

import os
import shutil
from pathlib import Path

import pytest

from tests.system.jobs import ENDLESS, Job, environment
from unilab_fabric.launch.affinity import affinity_mask, parse_cpu_list, physical_cores

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")
TWO_CORES = pytest.mark.skipif(len(physical_cores(affinity_mask())) < 2, reason="needs two physical cores")
POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def allowed(pid):
    """The cores that each thread of a process may use."""
    found = []
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        found.append(frozenset(parse_cpu_list(fields["Cpus_allowed_list"].strip())))
    return found


def everything(found):
    return frozenset().union(*found)


@TWO_CORES
def test_ranks_and_collectors_are_held_to_disjoint_whole_cores(tmp_path):
    with Job(tmp_path, "--devices=2", ENDLESS, "--checkpoint.every=20") as job:
        processes = job.training(ranks=2)
        cores = {name: everything(allowed(pid)) for name, pid in processes.items() if name != "launcher"}
        ranks = [cores[f"rank {rank}"] | cores[f"collector {rank}"] for rank in range(2)]
        assert not ranks[0] & ranks[1]
        assert ranks[0] | ranks[1] <= set(affinity_mask())
        for share in ranks:  # no half of a core belongs to another rank
            assert any(share == {*core.cpus} for core in physical_cores(affinity_mask())) or len(share) > 1
        for rank in range(2):
            listed = f"rank {rank}: {min(ranks[rank])}"
            assert listed in job.text()  # the banner says so


def test_thread_pools_have_the_size_of_the_share(tmp_path):
    with Job(tmp_path, "--devices=1", ENDLESS, "--checkpoint.every=20") as job:
        processes = job.training(ranks=1)
        variables = environment(processes["collector 0"])
        assert {name: variables[name] for name in POOLS} == dict.fromkeys(POOLS, "1")
        # its own thread, and one of mjbatch for each physics thread
        (line,) = (line for line in job.text().splitlines() if line.startswith("  threads"))
        physics = int(line.split("physics ")[1].split(",")[0])
        assert len(allowed(processes["collector 0"])) <= 1 + physics
        learner = int(line.split("learner ")[1])
        assert all(f"{name}={learner}" in job.text() for name in POOLS)


def test_one_core_is_enough(tmp_path):
    core = min(affinity_mask())
    if not shutil.which("taskset"):
        pytest.skip("no taskset here")
    wrapper = ["taskset", "-c", str(core)]
    with Job(tmp_path, "--devices=1", "--training.max_env_steps=800", wrapper=wrapper) as job:
        assert job.wait() == 0, job.text()
        assert "threads    per rank: physics 1, learner 1" in job.text()
    with Job(tmp_path, "--devices=2", "--training.max_env_steps=800", wrapper=wrapper) as job:
        assert job.wait() == 2
        assert (
            "error: training.devices is 2; that is 2 ranks, and each needs a CPU core; this process may use 1 core"
        ) in job.text().splitlines()


@TWO_CORES
def test_cores_of_the_collectors_can_be_named(tmp_path):
    first, second = (core.cpus[0] for core in physical_cores(affinity_mask())[:2])
    lists = f"--training.collector_cpus=[[{second}],[{first}]]"
    with Job(tmp_path, "--devices=2", ENDLESS, "--checkpoint.every=20", lists) as job:
        processes = job.training(ranks=2)
        assert everything(allowed(processes["collector 0"])) == {second}
        assert everything(allowed(processes["collector 1"])) == {first}


@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/sys/fs/cgroup/cgroup.controllers").is_file(), reason="needs cgroups"
)
def test_a_container_s_quota_counts(tmp_path):
    group = Path("/sys/fs/cgroup/unilab_fabric_test")
    try:
        group.mkdir()
        (group / "cpu.max").write_text("100000 100000")  # one CPU's worth
    except OSError:
        group.rmdir() if group.is_dir() else None
        pytest.skip("no CPU controller for a group of our own")
    try:
        wrapper = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]
        with Job(tmp_path, "--devices=2", "--training.max_env_steps=800", wrapper=wrapper) as job:
            assert job.wait() == 2
            assert "this process may use 1 core" in job.text()
        with Job(tmp_path, "--devices=1", "--training.max_env_steps=800", wrapper=wrapper) as job:
            assert job.wait() == 0, job.text()
            assert "threads    per rank: physics 1, learner 1" in job.text()
    finally:
        group.rmdir()
