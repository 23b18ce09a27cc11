"""Whole cores for each rank, within what the affinity mask and the container's quota allow.

Ranks get blocks of physical cores: two ranks on the two hyper-threads of one core would halve each other. A block
stays inside one NUMA node where that costs no core, so that a rank's memory is near its cores.
"""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


@dataclass(frozen=True)
class Core:
    """One physical core: the allowed logical CPUs of it, and the NUMA node it belongs to."""

    cpus: tuple[int, ...]
    node: int = 0


def allowed_cores(needed: int = 1, root: Path = _ROOT) -> tuple[Core, ...]:
    """The physical cores this process may keep busy: those of its affinity mask, as many as the quota pays for.

    Where the mask has fewer physical cores than `needed`, each logical CPU counts as a core.
    """
    cores = physical_cores(affinity_mask(), root)
    if len(cores) < needed:
        cores = tuple(Core(cpus=(cpu,), node=core.node) for core in cores for cpu in core.cpus)
    quota = cpu_quota(root)
    return cores if quota is None else cores[: max(1, int(quota))]


def affinity_mask() -> tuple[int, ...]:
    """Logical CPUs this process may run on, ascending; all of them where the system has no such mask."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that the control groups of this process grant, or None where nothing limits it.

    Reads version 2 (`cpu.max`) and version 1 (`cpu.cfs_quota_us`); the tightest group on the path counts.
    """
    quotas = [quota for folder in cgroup_folders("cpu", root) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def physical_cores(cpus: Iterable[int], root: Path = _ROOT) -> tuple[Core, ...]:
    """Logical CPUs put together by physical core, NUMA node by NUMA node.

    Where the system does not tell (`/sys` is missing), each CPU counts as a core of node 0.
    """
    allowed = set(cpus)
    node_of = _numa_nodes(root)
    cores = set()
    for cpu in allowed:
        siblings = _siblings(cpu, root) & allowed
        cores.add(Core(cpus=tuple(sorted(siblings)), node=node_of.get(cpu, 0)))
    return tuple(sorted(cores, key=lambda core: (core.node, core.cpus)))


def split_cores(cores: Sequence[Core], ranks: int) -> tuple[tuple[Core, ...], ...]:
    """Disjoint blocks of equal size, one for each rank; cores that do not divide stay idle.

    Ranks wait for each other at every optimiser step, so a larger block for one of them would buy nothing.
    """
    share = len(cores) // ranks
    if share < 1:
        raise ValueError(f"{len(cores)} cores cannot be split among {ranks} ranks")
    inside = [block for node in _by_node(cores) for block in _blocks(node, share)]
    blocks = inside if len(inside) >= ranks else _blocks(cores, share)
    return tuple(blocks[:ranks])


def cpus_of(cores: Iterable[Core]) -> tuple[int, ...]:
    """All logical CPUs of some cores, ascending."""
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def cgroup_folders(controller: str, root: Path = _ROOT) -> list[Path]:
    """Folders of the control groups that may limit this process, each group's ancestors included."""
    membership = root / "proc/self/cgroup"
    if not membership.is_file():
        return []
    folders = []
    for line in membership.read_text().splitlines():
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            mounts = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
        elif controller in controllers.split(","):
            mounts = [root / "sys/fs/cgroup" / controllers, root / "sys/fs/cgroup" / controller]
        else:
            continue
        # a container often sees its group as the root of the mount, whatever path is written here
        path = PurePosixPath(group.lstrip("/"))
        folders += [mount / part for mount in mounts for part in (path, *path.parents)]
    return folders


def parse_cpu_list(text: str) -> set[int]:
    """The kernel's notation of CPU sets: `0-3,8` is {0, 1, 2, 3, 8}."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _by_node(cores: Sequence[Core]) -> list[list[Core]]:
    nodes: dict[int, list[Core]] = {}
    for core in cores:
        nodes.setdefault(core.node, []).append(core)
    return list(nodes.values())


def _blocks(cores: Sequence[Core], share: int) -> list[tuple[Core, ...]]:
    return [tuple(cores[start : start + share]) for start in range(0, len(cores) - share + 1, share)]


def _siblings(cpu: int, root: Path) -> set[int]:
    """Logical CPUs of the same physical core, itself included."""
    file = root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
    return parse_cpu_list(file.read_text()) if file.is_file() else {cpu}


def _numa_nodes(root: Path) -> dict[int, int]:
    nodes = {}
    for folder in (root / "sys/devices/system/node").glob("node[0-9]*"):
        for cpu in parse_cpu_list((folder / "cpulist").read_text()):
            nodes[cpu] = int(folder.name.removeprefix("node"))
    return nodes


def _quota_of(folder: Path) -> float | None:
    version_2 = folder / "cpu.max"
    if version_2.is_file():
        quota, period = version_2.read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    version_1 = folder / "cpu.cfs_quota_us"
    if version_1.is_file():
        microseconds = int(version_1.read_text())
        return None if microseconds < 0 else microseconds / int((folder / "cpu.cfs_period_us").read_text())
    return None
