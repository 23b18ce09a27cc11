"""Tests start jobs of their own, wherever they run: what a cluster or a shell says about ranks is not for them."""

import os
import signal

import pytest

_PREFIXES = ("LT_", "SLURM_", "OMPI_", "TORCHELASTIC_", "MASTER_")
_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK")

for _name in list(os.environ):
    if _name.startswith(_PREFIXES) or _name in _RANKS:
        del os.environ[_name]

if not os.environ.get("DISPLAY"):
    os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is loaded

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a shell; the jobs would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def same_cores():
    """A test that leaves this process on fewer cores would fail or slow down those after it."""
    before = os.sched_getaffinity(0)
    yield
    after = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before)
    assert after == before


def pytest_runtest_logreport(report):
    """Names a failure when it happens: the list at the end never comes where the run is ended from outside."""
    if report.failed:
        print(f"\n{report.nodeid}: {report.when} failed", flush=True)
