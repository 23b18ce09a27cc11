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

    def __init__(self, folder, *arguments, environment=None):
        self.folder = folder
        self.run = folder / "runs" / "run"
        self.output = folder / "output.txt"
        with self.output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "unilab_fabric", "fit", *SMALL, *arguments],
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
        for pid in self._seen | {self.process.pid}:
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
        """Process ids by name: rank 0, collector 0, rank 1, collector 1, as far as they live."""
        found = {"rank 0": self.process.pid}
        for pid in children(self.process.pid):
            words = command(pid)
            if "unilab_fabric.launch.job" in words:
                found["rank 1"] = pid
                for child in children(pid):
                    if "unilab_fabric.offpolicy.collector" in command(child):
                        found["collector 1"] = child
            elif "unilab_fabric.offpolicy.collector" in words:
                found["collector 0"] = pid
        self._seen |= set(found.values())
        return found

    def training(self, ranks):
        """Waits until all processes of `ranks` ranks live and the first checkpoint is written; their ids."""
        self.wait_for(lambda: len(self.processes()) == 2 * ranks)
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


def alive(pids):
    """Those of the processes that still run; a zombie does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
                found.append(pid)
    return found


def all_gone(pids, within_s=10):
    """Whether the processes end in time."""
    deadline = time.monotonic() + within_s
    while alive(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not alive(pids)
