import os

import pytest

from tests.launch.machines import Machine
from unilab_fabric.launch import affinity
from unilab_fabric.launch.affinity import Core, allowed_cores, cpu_quota, cpus_of, physical_cores, split_cores


def blocks_of(machine, ranks):
    return [cpus_of(block) for block in split_cores(physical_cores(machine.cpus, machine.root), ranks)]


def test_hyper_threads_of_one_core_stay_together(tmp_path):
    machine = Machine(tmp_path, cores=4, threads=2)
    assert blocks_of(machine, 2) == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_ranks_fill_one_numa_node_after_the_other(tmp_path):
    machine = Machine(tmp_path, cores=8, nodes=2)
    assert blocks_of(machine, 2) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert blocks_of(machine, 3) == [(0, 1), (2, 3), (4, 5)]


def test_a_block_stays_in_one_node_where_that_costs_no_core():
    cores = [Core((cpu,), node=0 if cpu < 5 else 1) for cpu in range(9)]  # 5 cores and 4
    assert [cpus_of(block) for block in split_cores(cores, 4)] == [(0, 1), (2, 3), (5, 6), (7, 8)]


def test_a_block_spans_nodes_where_staying_inside_would_cost_cores():
    cores = [Core((cpu,), node=cpu // 5) for cpu in range(10)]
    assert [cpus_of(block) for block in split_cores(cores, 3)] == [(0, 1, 2), (3, 4, 5), (6, 7, 8)]


def test_cores_that_do_not_divide_stay_idle(tmp_path):
    assert blocks_of(Machine(tmp_path, cores=5), 2) == [(0, 1), (2, 3)]


def test_blocks_are_disjoint_and_of_one_size_on_any_machine(tmp_path):
    for cores, threads, nodes in [(6, 1, 1), (6, 2, 2), (16, 2, 4), (3, 1, 1)]:
        machine = Machine(tmp_path / f"{cores}-{threads}-{nodes}", cores=cores, threads=threads, nodes=nodes)
        for ranks in range(1, cores + 1):
            blocks = blocks_of(machine, ranks)
            assert len(blocks) == ranks
            assert len({len(block) for block in blocks}) == 1
            joined = [cpu for block in blocks for cpu in block]
            assert len(set(joined)) == len(joined)
            assert set(joined) <= set(machine.cpus)


def test_more_ranks_than_cores_cannot_be_split():
    with pytest.raises(ValueError, match="1 cores cannot be split among 2 ranks"):
        split_cores([Core((0,))], 2)


def test_only_cpus_of_the_mask_count(tmp_path):
    machine = Machine(tmp_path, cores=4, threads=2)
    assert physical_cores({1, 5, 6}, machine.root) == (Core((1, 5)), Core((6,)))


def test_a_system_that_does_not_tell_has_one_core_for_each_cpu(tmp_path):
    assert physical_cores([3, 1], tmp_path) == (Core((1,)), Core((3,)))


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("800000 100000", 8.0)])
def test_quota_of_version_2(tmp_path, text, quota):
    machine = Machine(tmp_path, cores=8)
    machine.quota_v2("/job/step", text)
    assert cpu_quota(machine.root) == quota


def test_the_tightest_group_on_the_path_counts(tmp_path):
    machine = Machine(tmp_path, cores=8)
    machine.quota_v2("/job", "200000 100000")
    machine.quota_v2("/job/step", "400000 100000")
    assert cpu_quota(machine.root) == 2.0


@pytest.mark.parametrize("folder", ["/docker/abc", ""])  # as the host sees the group, and as the container does
def test_quota_of_version_1(tmp_path, folder):
    machine = Machine(tmp_path, cores=8)
    machine.quota_v1("/docker/abc", 300000, folder)
    assert cpu_quota(machine.root) == 3.0


def test_version_1_without_a_quota(tmp_path):
    machine = Machine(tmp_path, cores=8)
    machine.quota_v1("/", -1, "")
    assert cpu_quota(machine.root) is None


def test_cores_in_use_stay_within_mask_and_quota(tmp_path, monkeypatch):
    machine = Machine(tmp_path, cores=8, threads=2)
    monkeypatch.setattr(affinity, "affinity_mask", lambda: tuple(range(2, 16)))
    assert len(allowed_cores(root=machine.root)) == 8  # cores 0 and 1 by their second thread
    machine.quota_v2("/", "350000 100000")
    assert [core.cpus for core in allowed_cores(root=machine.root)] == [(2, 10), (3, 11), (4, 12)]
    machine.quota_v2("/", "50000 100000")
    assert len(allowed_cores(root=machine.root)) == 1


def test_hyper_threads_count_as_cores_where_cores_are_too_few(tmp_path, monkeypatch):
    machine = Machine(tmp_path, cores=1, threads=2)
    monkeypatch.setattr(affinity, "affinity_mask", lambda: (0, 1))
    assert allowed_cores(1, machine.root) == (Core((0, 1)),)
    assert allowed_cores(2, machine.root) == (Core((0,)), Core((1,)))
    machine.quota_v2("/", "100000 100000")
    assert len(allowed_cores(2, machine.root)) == 1


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity mask")
def test_this_process_may_use_what_its_mask_says():
    assert set(cpus_of(allowed_cores())) <= os.sched_getaffinity(0)
