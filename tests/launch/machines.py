"""Machines that are not there: the files of /sys and /proc that say what one looks like."""

from pathlib import Path


class Machine:
    """Cores in /sys below `root`; hyper-thread k of core c is CPU c + k * cores, as Linux numbers them."""

    def __init__(self, root: Path, *, cores: int, threads: int = 1, nodes: int = 1):
        self.root = root
        self.cpus = range(cores * threads)
        for cpu in self.cpus:
            siblings = [cpu % cores + k * cores for k in range(threads)]
            self.write(f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", ",".join(map(str, siblings)))
        for node in range(nodes):
            mine = [cpu for cpu in self.cpus if cpu % cores * nodes // cores == node]
            self.write(f"sys/devices/system/node/node{node}/cpulist", ",".join(map(str, mine)))

    def write(self, path: str, text: str) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")

    def quota_v2(self, group: str, text: str) -> None:
        """`group` is what /proc/self/cgroup says, `text` its cpu.max."""
        self.write("proc/self/cgroup", f"0::{group}")
        self.write(f"sys/fs/cgroup{group}/cpu.max", text)

    def quota_v1(self, group: str, microseconds: int, folder: str) -> None:
        """`folder` is where the quota stands below the mount, which in a container is not the group's path."""
        self.write("proc/self/cgroup", f"5:memory:/\n4:cpu,cpuacct:{group}")
        self.write(f"sys/fs/cgroup/cpu,cpuacct{folder}/cpu.cfs_quota_us", str(microseconds))
        self.write(f"sys/fs/cgroup/cpu,cpuacct{folder}/cpu.cfs_period_us", "100000")
