"""Real jobs: the command as a user types it, its processes, and what it leaves behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from unilab_fabric.checkpoints import whole_checkpoints

SMALL = [
    "--config=cartpole.yaml",
    "--task.num_envs=8",
    "--learner.batch_size=32",
    "--learner.actor_hidden=[16]",
    "--learner.critic_hidden=[16]",
    "--training.run_name=run",
    "--training.log_every=10",
    "--training.accelerator=cpu",
]
"""A run of the smallest size; add --training.max_env_steps."""
ENDLESS = "--training.max_env_steps=1_000_000_000"


class Job:
    """`fit` in a folder; use it as a context, so that nothing outlives the test."""

    def __init__(self, folder, *arguments, environment=None, wrapper=(), small=SMALL):
        self.folder = folder
        self.run = folder / "runs" / "run"
        self.output = folder / "output.txt"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [*wrapper, sys.executable, "-m", "unilab_fabric", "fit", *small, *arguments],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment or os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
                start_new_session=True,
            )
        self._seen = set()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for pid in self._seen | {self.process.pid} | working_in(self.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(10)

    def wait(self, within_s=90):
        """The exit status."""
        return self.process.wait(within_s)

    def text(self):
        return self.output.read_text(errors="replace")

    def summary(self):
        return json.loads((self.run / "run_summary.json").read_text())

    def failure(self):
        return json.loads((self.run / "failure.json").read_text())

    def wait_for(self, condition, within_s=60):
        """Waits until `condition()` holds; the job must be alive until then."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert self.process.poll() is None, f"the job ended:\n{self.text()}"
            assert time.monotonic() < deadline, f"nothing within {within_s} s:\n{self.text()}"
            time.sleep(0.05)

    def processes(self):
        """Process ids by name: launcher, rank 0, collector 0, rank 1, ..., as far as they live.

        A job of one rank has no launcher: the command is the rank.
        """
        ranks = {self.process.pid: "rank 0"}
        for pid in children(self.process.pid):
            if "unilab_fabric.launch.process" in command(pid):
                ranks[pid] = f"rank {environment(pid).get('RANK')}"
        if len(ranks) > 1:
            ranks[self.process.pid] = "launcher"
        found = {name: pid for pid, name in ranks.items()}
        for pid, name in ranks.items():
            for child in children(pid):
                if "unilab_fabric.loop.collector" in command(child):
                    found[name.replace("rank", "collector")] = child
        self._seen |= set(found.values())
        return found

    def left(self):
        """Process ids of this job that still run: those seen, and whatever else works in its folder."""
        return alive(self._seen | {self.process.pid} | working_in(self.folder))

    def all_gone(self, within_s=10):
        """Whether no process of the job is left in time."""
        deadline = time.monotonic() + within_s
        while self.left() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.02)
        return not self.left()

    def started(self, ranks):
        """Waits until all processes of `ranks` ranks live; their ids."""
        expected = 2 * ranks + (ranks > 1)
        self.wait_for(lambda: len(self.processes()) == expected)
        return self.processes()

    def training(self, ranks):
        """Waits until all processes of `ranks` ranks live and the first checkpoint is written; their ids."""
        self.started(ranks)
        self.wait_for(lambda: whole_checkpoints(self.run))
        return self.processes()


def children(pid):
    """Process ids of the direct children."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rsplit(")", 1)[1].split()
            if int(fields[1]) == pid:
                found.append(int(path.parent.name))
    return found


def command(pid):
    """Words of a process's command line."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    return []


def environment(pid):
    """A process's variables when it was started."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
        return dict(word.split("=", 1) for word in words if "=" in word)
    return {}


def working_in(folder):
    """Process ids whose working folder this is."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cwd"):
        with contextlib.suppress(OSError):
            if path.readlink() == folder:
                found.add(int(path.parent.name))
    return found


def alive(pids):
    """Those of the processes that still run; a zombie does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(pid)
    return found
