import dataclasses
import os
import subprocess
import sys

import pytest

from unilab_fabric.config import TrainingConfig
from unilab_fabric.errors import UserErrors
from unilab_fabric.launch import affinity, devices
from unilab_fabric.launch.affinity import Core
from unilab_fabric.launch.devices import load_topology, resolve_topology


@pytest.fixture
def machine(monkeypatch):
    """A machine with `cores` cores of `threads` threads and `cuda` devices; no rank variable is set."""

    def build(*, cores=8, threads=1, cuda=0):
        cpus = tuple(range(cores * threads))
        every = tuple(Core(tuple(cpu + k * cores for k in range(threads))) for cpu in range(cores))
        monkeypatch.setattr(devices, "cuda_device_count", lambda: cuda)
        monkeypatch.setattr(devices, "affinity_mask", lambda: cpus)
        monkeypatch.setattr(affinity, "affinity_mask", lambda: cpus)
        monkeypatch.setattr(affinity, "cpu_quota", lambda root: None)
        monkeypatch.setattr(affinity, "physical_cores", lambda cpus, root: every)

    build()
    return build


def resolve(devices=None, environ=None, **training):
    return resolve_topology(TrainingConfig(devices=devices, **training), environ or {})


def problems(devices=None, environ=None, **training):
    with pytest.raises(UserErrors) as caught:
        resolve(devices, environ, **training)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize("cuda", [0, 2])
def test_four_ways_to_say_one_rank_are_the_same_topology(machine, cuda):
    machine(cuda=cuda)
    one = resolve(None)
    assert resolve([]) == resolve([0]) == resolve(1) == one
    assert one.world_size == one.local_world_size == 1
    assert not one.pinned


@pytest.mark.parametrize(("asked", "ranks"), [(2, 2), (8, 8), ([0, 1, 2], 3), ([1, 0], 2), ("auto", 1)])
def test_ranks_on_the_cpu(machine, asked, ranks):
    topology = resolve(asked)
    assert topology.accelerator == "cpu"
    assert topology.devices == tuple(range(ranks))
    assert topology.started_by == "us"
    assert (topology.rank, topology.local_rank, topology.node_rank) == (0, 0, 0)


@pytest.mark.parametrize(
    ("asked", "used"), [(None, (0,)), (2, (0, 1)), ([2, 0], (2, 0)), ([3], (3,)), ("auto", (0, 1, 2, 3))]
)
def test_ranks_on_cuda_devices_in_the_order_given(machine, asked, used):
    machine(cuda=4)
    topology = resolve(asked)
    assert topology.accelerator == "cuda"
    assert topology.devices == used


def test_the_cpu_can_be_asked_for_where_there_are_devices(machine):
    machine(cuda=4)
    assert resolve(2, accelerator="cpu").accelerator == "cpu"


@pytest.mark.parametrize(
    ("asked", "cuda", "said"),
    [
        (3, 2, "training.devices is 3; this machine has devices 0 and 1"),
        ([0, 2], 2, "training.devices is [0, 2]; this machine has devices 0 and 1"),
        ([1], 1, "training.devices is [1]; this machine has one device, 0"),
        ([0, 4], 4, "training.devices is [0, 4]; this machine has devices 0 to 3"),
        ([0, 0], 2, "training.devices is [0, 0]; allowed: each device once"),
        ([-1], 2, "training.devices is [-1]; this machine has devices 0 and 1"),
        (0, 2, "training.devices is 0; allowed: 1 or more, a list of devices, auto or null"),
        (-1, 0, "training.devices is -1; allowed: 1 or more, a list of devices, auto or null"),
        ([0, 0], 0, "training.devices is [0, 0]; allowed: each device once"),
        ([0, 2], 0, "training.devices is [0, 2]; allowed on the CPU: n or [0, ..., n - 1] for n ranks"),
        ([3], 0, "training.devices is [3]; allowed on the CPU: n or [0, ..., n - 1] for n ranks"),
        (9, 0, "training.devices is 9; that is 9 ranks, and each needs a CPU core; this process may use 8 cores"),
    ],
)
def test_impossible_devices_are_one_line(machine, asked, cuda, said):
    machine(cuda=cuda)
    assert problems(asked) == [said]


def test_more_devices_than_cores_is_an_error_too(machine):
    machine(cores=2, cuda=4)
    assert problems("auto") == [
        "training.devices is auto; that is 4 ranks, and each needs a CPU core; this process may use 2 cores"
    ]


def test_cuda_without_a_device(machine):
    assert problems(accelerator="cuda") == [
        "training.accelerator is cuda; PyTorch sees no CUDA device; allowed here: auto, cpu"
    ]


def test_all_problems_are_told_at_once(machine):
    said = problems(9, {"LT_DEVICES": "2", "LOCAL_RANK": "1"}, num_nodes=2)
    assert [line.split(" is ")[0] for line in said] == [
        "LT_DEVICES",
        "training.num_nodes",
        "LOCAL_RANK",
        "training.devices",
    ]


@pytest.mark.parametrize(
    ("cores", "cuda", "asked", "physics", "learner"),
    [
        (2, 0, 1, 1, 1),
        (2, 0, 2, 1, 1),  # both use the rank's only core
        (3, 0, 1, 2, 1),
        (8, 0, 1, 4, 4),
        (8, 0, 2, 2, 2),
        (16, 2, 2, 7, 1),
        (1, 1, 1, 1, 1),
    ],
)
def test_a_ranks_cores_are_split_between_physics_and_learner(machine, cores, cuda, asked, physics, learner):
    machine(cores=cores, cuda=cuda)
    topology = resolve(asked)
    assert (topology.physics_threads, topology.learner_threads) == (physics, learner)
    for cpus, mine, others in zip(topology.cpus, topology.collector_cpus, topology.learner_cpus, strict=True):
        assert len(mine) == physics
        assert set(mine) | set(others) == set(cpus)
        assert len(cpus) == 1 or not set(mine) & set(others)
        assert physics + learner <= max(2, len(cpus))


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_own_disjoint_whole_cores_and_are_held_to_them(machine, ranks):
    machine(cores=8, threads=2)
    topology = resolve(ranks)
    assert topology.pinned
    joined = [cpu for cpus in topology.cpus for cpu in cpus]
    assert len(set(joined)) == len(joined)
    for cpus in topology.cpus:
        assert {(cpu + 8) % 16 for cpu in cpus} == set(cpus)  # with a thread its sibling


def test_physics_and_learner_take_a_thread_each_of_a_single_core(machine):
    machine(cores=1, threads=2)
    topology = resolve()
    assert topology.collector_cpus == ((0, 1),)
    assert (topology.physics_threads, topology.learner_threads) == (1, 1)


def test_collector_cpus_are_taken_as_given_and_the_rest_is_shared(machine):
    topology = resolve(2, collector_cpus=[[0, 1], [4, 5]])
    assert topology.collector_cpus == ((0, 1), (4, 5))
    assert topology.learner_cpus == ((2, 3), (6, 7))
    assert (topology.physics_threads, topology.learner_threads) == (2, 2)
    assert topology.pinned


def test_collector_cpus_may_take_every_core(machine):
    machine(cores=2)
    topology = resolve(2, collector_cpus=[[1], [0]])
    assert topology.cpus == topology.learner_cpus == ((1,), (0,))


def test_collector_cpus_pin_a_single_rank_too(machine):
    assert resolve(collector_cpus=[[3]]).pinned


@pytest.mark.parametrize(
    ("lists", "allowed"),
    [
        ([[0]], "allowed: one list for each rank of this machine, 2 in all"),
        ([[0], []], "allowed: lists of one length, 1 or more; ranks wait for the slowest"),
        ([[], []], "allowed: lists of one length, 1 or more; ranks wait for the slowest"),
        ([[0, 1], [2]], "allowed: lists of one length, 1 or more; ranks wait for the slowest"),
        ([[0, 1], [1, 2]], "allowed: each core once"),
        ([[0], [8]], "this process may use cores 0, 1, 2, 3, 4, 5, 6, 7"),
    ],
)
def test_wrong_collector_cpus(machine, lists, allowed):
    assert problems(2, collector_cpus=lists) == [f"training.collector_cpus is {lists}; {allowed}"]


TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "LOCAL_RANK": "1",
    "RANK": "3",
}
SLURM = {
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_NAME": "train",
}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.fixture
def mpi4py(monkeypatch):
    monkeypatch.setattr("unilab_fabric.launch.devices.mpi4py_is_missing", lambda: False)


def test_mpi_without_the_package_that_sees_it_is_refused(machine):
    assert problems(2, MPI, num_nodes=2) == ["OMPI_COMM_WORLD_SIZE is 4; to train under MPI, install mpi4py"]


@pytest.mark.parametrize(("starter", "environ"), [("torchrun", TORCHRUN), ("slurm", SLURM), ("mpi", MPI)])
def test_who_started_the_processes_decides_rank_and_machine(machine, mpi4py, starter, environ):
    for asked in (2, "auto"):
        topology = resolve(asked, environ, num_nodes=2)
        assert topology.started_by == starter
        assert (topology.world_size, topology.local_world_size, topology.num_nodes) == (4, 2, 2)
        assert (topology.rank, topology.node_rank, topology.local_rank) == (3, 1, 1)


@pytest.mark.parametrize(
    ("environ", "name"), [(TORCHRUN, "torchrun"), (SLURM, "SLURM"), (MPI, "MPI")], ids=["torchrun", "slurm", "mpi"]
)
def test_a_world_of_another_size_than_asked_is_refused(machine, mpi4py, environ, name):
    assert problems(None, environ, num_nodes=2) == [
        f"training.devices is null; that is 1 rank on this machine, but {name} started 2; the two must agree"
    ]
    assert problems(2, environ) == [f"training.num_nodes is 1; {name} started 4 ranks, 2 on this machine; allowed: 2"]


def test_an_interactive_slurm_shell_starts_nothing(machine):
    assert resolve(2, {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "interactive"}).started_by == "us"


def test_a_slurm_allocation_of_one_task_does_not_become_two_ranks(machine):
    assert problems(2, {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train"}) == [
        "training.devices is 2; that is 2 ranks on this machine, but SLURM started 1; the two must agree"
    ]


def test_several_machines_need_someone_to_start_them(machine):
    assert problems(num_nodes=2) == [
        "training.num_nodes is 2; allowed: 1, unless torchrun, SLURM or MPI starts the processes; "
        "none of them started this one"
    ]


@pytest.mark.parametrize("name", ["LOCAL_RANK", "RANK", "GROUP_RANK"])
@pytest.mark.parametrize("value", ["0", "1"])
def test_left_over_rank_variables_are_refused_where_we_start_ranks(machine, name, value):
    assert problems(2, {name: value}) == [
        f"{name} is {value}; left over in the environment, it contradicts training.devices = 2 "
        "(2 ranks, started by us); unset it"
    ]


def test_rank_variables_that_say_what_is_asked_do_no_harm(machine):
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "NODE_RANK": "0", "MASTER_ADDR": "elsewhere"}
    assert resolve(1, alone) == resolve(1)
    assert resolve(2, {"WORLD_SIZE": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}) == resolve(2)


@pytest.mark.parametrize(("name", "value"), [("LOCAL_RANK", "1"), ("WORLD_SIZE", "2"), ("NODE_RANK", "1")])
def test_a_single_rank_refuses_variables_that_contradict_it(machine, name, value):
    assert [line.split(";")[0] for line in problems(None, {name: value})] == [f"{name} is {value}"]


def test_ranks_on_this_machine_do_not_meet_at_another(machine):
    assert problems(2, {"MASTER_ADDR": "node7"}) == ["MASTER_ADDR is node7; all ranks are on this machine; unset it"]


@pytest.mark.parametrize("name", ["LT_DEVICES", "LT_ACCELERATOR", "LT_STRATEGY", "LT_NUM_NODES", "LT_PRECISION"])
def test_variables_that_fabric_would_obey_are_refused(machine, name):
    assert problems(1, {name: "2"}) == [f"{name} is 2; Fabric would put it before the configuration; unset it"]


def test_a_variable_that_is_no_number_is_named(machine):
    assert problems(2, {**TORCHRUN, "LOCAL_RANK": "one"}, num_nodes=2)[0] == (
        "LOCAL_RANK is one; allowed in the environment: a whole number, 0 or more"
    )
    assert problems(2, {"TORCHELASTIC_RUN_ID": "none"})[0].startswith("WORLD_SIZE is not set; ")


def test_torch_is_not_loaded_where_no_driver_is_visible():
    if any(os.path.exists(file) for file in devices._DRIVER_FILES):
        pytest.skip("an NVIDIA driver is visible")
    program = (
        "import sys\n"
        "from unilab_fabric.config import TrainingConfig\n"
        "from unilab_fabric.launch.devices import resolve_topology\n"
        "resolve_topology(TrainingConfig(), {})\n"
        "assert 'torch' not in sys.modules and 'lightning' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_topology_survives_being_told_to_another_rank(machine):
    machine(cuda=2)
    topology = resolve(2)
    other = load_topology(topology.dump(), local_rank=1)
    assert other == dataclasses.replace(topology, local_rank=1)
    assert (topology.rank, other.rank) == (0, 1)
