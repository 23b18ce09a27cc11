"""What ends a job, and how: real processes, a fault at a chosen moment, and everything that must hold afterwards.

`pytest` runs a part of the table, `tox -e faults` all of it.
"""

import os
import shutil
import signal
import subprocess
import time
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.system.jobs import ENDLESS, Job
from tests.system.tasks import mark
from unilab_fabric.checkpoints import read_manifest, read_state, whole_checkpoints

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks at processes through /proc")

KILL, TERM, INT, STOP = signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSTOP
VICTIMS = ("launcher", "rank 0", "rank 1", "collector 0", "collector 1")
MOMENTS = ("starting", "first step", "steady", "saving", "last step")
LIMIT_S = 10
STALL_S = 5
LAST_STEP = 60
QUICK = {
    ("launcher", KILL, "steady"),
    ("launcher", TERM, "saving"),
    ("launcher", STOP, "steady"),
    ("rank 0", KILL, "saving"),
    ("rank 0", STOP, "steady"),
    ("rank 0", INT, "first step"),
    ("rank 1", KILL, "steady"),
    ("rank 1", TERM, "starting"),
    ("rank 1", TERM, "steady"),
    ("rank 1", STOP, "starting"),
    ("collector 0", KILL, "last step"),
    ("collector 1", KILL, "starting"),
    ("collector 1", STOP, "steady"),
    ("collector 1", INT, "steady"),
}
"""The cases of every test run: each fault, each victim and each moment at least once."""
TABLE = [
    pytest.param(*case, marks=[] if case in QUICK else pytest.mark.faults, id=f"{case[1].name} {case[0]}, {case[2]}")
    for case in product(VICTIMS, (KILL, TERM, INT, STOP), MOMENTS)
]
SEGMENTS = Path("/dev/shm")


@pytest.fixture(autouse=True)
def no_segment_is_left():
    before = set(SEGMENTS.iterdir()) if SEGMENTS.is_dir() else set()
    yield
    after = set(SEGMENTS.iterdir()) if SEGMENTS.is_dir() else set()
    assert after <= before


@pytest.fixture
def ends(record_property):
    """Waits until the job is gone, and notes for the summary how long that took."""

    def wait(job, fault, since, within_s=LIMIT_S):
        assert job.all_gone(within_s), f"{job.left()} are left:\n{job.text()}"
        record_property("fault", fault)
        record_property("end_s", time.monotonic() - since)

    return wait


def two_ranks(folder, moment, *more):
    length = f"--training.max_env_steps={2 * 8 * LAST_STEP}" if moment == "last step" else ENDLESS
    return Job(
        folder,
        "--devices=2",
        "--task=tests.system.tasks.Held",
        f"--task.hold={'' if moment == 'steady' else moment}",
        f"--task.last_step={LAST_STEP}",
        "--checkpoint.every=20",
        f"--training.stall_timeout_s={STALL_S}",
        length,
        *more,
    )


def wait_for(job, moment):
    """Until the job stands at the moment, on both ranks; its processes."""
    processes = job.started(ranks=2)
    if moment == "steady":
        return job.training(ranks=2)
    job.wait_for(lambda: all((job.folder / mark(moment, rank)).exists() for rank in range(2)))
    return processes


def assert_last_checkpoint_is_whole(job):
    for path in whole_checkpoints(job.run)[-1:]:
        for name in read_manifest(path)["files"]:
            if name.endswith(".pt"):
                read_state(path, name)


def assert_cause_is_shown(job, reason):
    assert job.failure()["status"] == job.summary()["status"] == "failed"
    assert job.summary()["reason"] == job.failure()["reason"]
    assert reason in job.failure()["reason"]
    last = job.text().splitlines()[-1]
    assert last.startswith("error: ")
    assert job.failure()["reason"] in last


@pytest.mark.parametrize(("victim", "number", "moment"), TABLE)
def test_a_signal_ends_the_job(tmp_path, ends, victim, number, moment):
    with two_ranks(tmp_path, moment) as job:
        processes = wait_for(job, moment)
        since = time.monotonic()
        os.kill(processes[victim], number)
        if victim == "launcher" and number == STOP:
            end_in_good_order_though_the_launcher_sleeps(job, moment)
            return
        ends(job, f"{number.name} {victim.split()[0]}", since, LIMIT_S + (2 * STALL_S if number == STOP else 0))
        status = job.wait(1)
        {KILL: killed, TERM: asked, INT: asked, STOP: stopped}[number](job, victim, number, moment, status)
        assert_last_checkpoint_is_whole(job)


def killed(job, victim, number, moment, status):
    if victim == "launcher":  # who could have said why is dead
        assert status == -KILL
        return
    assert status == 128 + KILL
    process, rank = victim.split()
    failure = job.failure()
    assert (failure["process"], failure["rank"], failure["signal"]) == (process, int(rank), "SIGKILL")
    assert_cause_is_shown(job, "killed by SIGKILL")


def asked(job, victim, number, moment, status):
    assert not (job.run / "failure.json").exists()
    assert "Traceback" not in job.text()
    if moment == "last step" and status == 0:  # the run was over before anybody could ask
        assert job.summary()["status"] == "completed"
    else:
        assert status == 128 + number
    if moment != "starting":
        saved = whole_checkpoints(job.run)
        assert saved[-1].name == f"tick-{job.summary()['ticks']:09d}"
        assert job.summary()["status"] in ("stopped", "completed")


def stopped(job, victim, number, moment, status):
    assert status == 1
    reason = job.failure()["reason"]
    assert_cause_is_shown(job, victim if victim.startswith("rank") else f"rank {victim.split()[1]}: collector")
    if victim.startswith("rank"):
        assert "sign of life" in reason or "does not answer" in reason or "was stopped" in reason
    else:
        assert "stopped" in reason


def end_in_good_order_though_the_launcher_sleeps(job, moment):
    """Nobody waits for the launcher: training goes on, and it takes note when it is woken."""
    if moment == "last step":
        assert until(lambda: whole_checkpoints(job.run) and (job.run / "run_summary.json").exists())
    else:
        before = len(job.text())
        assert until(lambda: job.run.exists() and whole_checkpoints(job.run) and len(job.text()) >= before)
    assert not (job.run / "failure.json").exists()
    job.process.send_signal(signal.SIGCONT)
    if moment == "last step":
        assert job.wait(LIMIT_S) == 0
    else:
        job.process.send_signal(TERM)
        assert job.wait(LIMIT_S) == 143
    assert job.all_gone()
    assert_last_checkpoint_is_whole(job)


def until(condition, within_s=30):
    deadline = time.monotonic() + within_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return bool(condition())


def test_a_second_signal_ends_everything_at_once(tmp_path, ends):
    with two_ranks(tmp_path, "first step", "--task.hold_s=60") as job:
        wait_for(job, "first step")
        since = time.monotonic()
        os.kill(job.process.pid, INT)
        time.sleep(0.3)
        assert job.process.poll() is None
        os.kill(job.process.pid, INT)
        ends(job, "second SIGINT", since)
        assert job.wait(1) == 130


@pytest.mark.parametrize("victim", ["rank 0", "collector 0"])
@pytest.mark.parametrize("number", [KILL, TERM, INT])
def test_a_job_of_one_rank_ends_too(tmp_path, ends, victim, number):
    with Job(tmp_path, "--devices=1", ENDLESS, "--checkpoint.every=20") as job:
        processes = job.training(ranks=1)
        since = time.monotonic()
        os.kill(processes[victim], number)
        ends(job, f"{number.name} with one rank", since)
        status = job.wait(1)
        if number == KILL:
            assert status == (128 + KILL if victim == "collector 0" else -KILL)
        else:
            asked(job, victim, number, "steady", status)
        assert_last_checkpoint_is_whole(job)


def test_two_ranks_that_are_killed_and_resumed_come_to_the_same_bits(tmp_path):
    length = f"--training.max_env_steps={2 * 8 * 150}"
    folders = [tmp_path / "straight", tmp_path / "killed"]
    for folder in folders:
        folder.mkdir()
    with Job(folders[0], "--devices=2", length) as job:
        assert job.wait() == 0, job.text()
    with Job(folders[1], "--devices=2", length, "--checkpoint.every=10") as job:
        processes = job.training(ranks=2)
        os.kill(processes["rank 1"], KILL)
        assert job.all_gone()
    with Job(folders[1], "--devices=2", length, "--ckpt_path=last") as job:
        assert job.wait() == 0, job.text()
        assert "start anew" not in job.text()
    for name in ("replicated.pt", "rank-0.pt", "rank-1.pt"):
        straight, resumed = (
            torch.load(whole_checkpoints(folder / "runs" / "run")[-1] / name, weights_only=True) for folder in folders
        )
        for part in {"learner", "replay", "generators"} & straight.keys():
            assert all(torch.equal(straight[part][key], resumed[part][key]) for key in straight[part])


# exceptions


@pytest.mark.parametrize(
    ("place", "rank", "said"),
    [
        ("start", 1, "RuntimeError: no start today"),
        ("step", 0, "RuntimeError: no step today"),
        pytest.param("step", 1, "RuntimeError: no step today", marks=pytest.mark.faults),
        ("reward", 1, "ZeroDivisionError: no reward today"),
        pytest.param("start", 0, "RuntimeError: no start today", marks=pytest.mark.faults),
        ("segfault", 1, "SIGABRT"),
    ],
)
def test_an_exception_in_an_environment_ends_the_job(tmp_path, place, rank, said):
    faults = ("--task=tests.system.tasks.Failing", f"--task.fail={place}", f"--task.fail_rank={rank}")
    with Job(tmp_path, "--devices=2", ENDLESS, "--checkpoint.every=20", *faults) as job:
        assert job.wait(60) == (128 + signal.SIGABRT if place == "segfault" else 1)
        assert job.all_gone(1)
        failure = job.failure()
        assert (failure["process"], failure["rank"]) == ("collector", rank)
        assert failure["tick"] is None if place == "start" else 25 <= failure["tick"] <= 30
        if place == "segfault":
            assert failure["signal"] == "SIGABRT"
        else:
            assert failure["traceback"].splitlines()[-1] == said
            assert job.text().splitlines()[-2] == said
        assert_cause_is_shown(job, f"rank {rank}: collector")
        assert_last_checkpoint_is_whole(job)


def test_an_exception_in_the_learner_ends_the_job(tmp_path):
    with Job(
        tmp_path, "--devices=2", ENDLESS, "--learner=tests.system.learners.Faulty", "--learner.fault=update"
    ) as job:
        assert job.wait(60) == 1
        assert job.all_gone(1)
        failure = job.failure()
        assert (failure["process"], failure["rank"]) == ("rank", 1)
        assert failure["traceback"].splitlines()[-1] == "RuntimeError: no update today"
        assert "in faulty_update" in failure["traceback"]
        assert_cause_is_shown(job, "no update today")
        assert "no update today" in (job.run / "rank-1.log").read_text()


def test_an_exception_in_a_hook_ends_the_job(tmp_path):
    logger = ("--logger=tests.system.learners.CountingLogger", "--logger.fail_at=2")
    with Job(tmp_path, "--devices=2", ENDLESS, *logger) as job:
        assert job.wait(60) == 1
        assert job.all_gone(1)
        assert job.failure()["rank"] == 0
        assert "ConnectionError: no report today" in job.failure()["traceback"]
        assert_cause_is_shown(job, "HookFailed: hook MetricsLogger failed")


# disks


def mounted(*command):
    """Whether a mount could be made; only root may."""
    return (
        shutil.which("mount") and subprocess.run(["mount", *command], capture_output=True, timeout=10).returncode == 0
    )


def test_a_full_disk_ends_the_job_with_the_last_checkpoint_whole(tmp_path):
    disk = tmp_path / "runs"
    disk.mkdir()
    if not mounted("-t", "tmpfs", "-o", "size=1500k", "tmpfs", str(disk)):
        pytest.skip("may not mount a small disk")
    try:
        with Job(tmp_path, "--devices=2", ENDLESS, "--checkpoint.every=40") as job:
            assert job.wait(90) == 1
            assert job.all_gone(1)
            assert_cause_is_shown(job, "No space left on device")
            assert whole_checkpoints(job.run)
            assert_last_checkpoint_is_whole(job)
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=10)


def test_a_folder_that_cannot_be_written_any_more_ends_the_job(tmp_path):
    with Job(tmp_path, "--devices=2", ENDLESS, "--checkpoint.every=40") as job:
        job.training(ranks=2)
        folder = job.run / "checkpoints"
        if os.geteuid():
            folder.chmod(0o500)
        elif not mounted("--bind", str(folder), str(folder)):
            pytest.skip("may not mount")
        try:
            if not os.geteuid():
                assert mounted("-o", "remount,ro,bind", str(folder))
            assert job.wait(60) == 1
            assert job.all_gone(1)
            assert_cause_is_shown(job, "Permission denied" if os.geteuid() else "Read-only file system")
            assert_last_checkpoint_is_whole(job)
        finally:
            if os.geteuid():
                folder.chmod(0o700)
            else:
                subprocess.run(["umount", str(folder)], check=True, timeout=10)


def test_a_small_shared_memory_mount_does_not_matter(tmp_path):
    inside = 'mount -t tmpfs -o size=4k tmpfs /dev/shm && exec "$@"'
    wrapper = ["unshare", "-m", "sh", "-c", inside, "sh"]
    if not shutil.which("unshare") or subprocess.run([*wrapper, "true"], capture_output=True, timeout=10).returncode:
        pytest.skip("may not make a mount namespace")
    with Job(tmp_path, "--devices=2", "--training.max_env_steps=800", wrapper=wrapper) as job:
        assert job.wait() == 0, job.text()


# trackers and slow phases


def test_a_tracker_that_starts_slowly_is_opened_once_and_holds_nobody_up(tmp_path):
    slow = (
        "--logger=tests.system.learners.CountingLogger",
        "--logger.start_s=12",
        f"--training.stall_timeout_s={STALL_S}",
    )
    with Job(tmp_path, "--devices=2", "--training.max_env_steps=3200", *slow) as job:
        assert job.wait() == 0, job.text()
        assert (tmp_path / "openings").read_text() == "opened\n"
        assert "warning" not in job.text()  # the whole run took less than it says it waits


def test_a_rank_that_builds_slowly_is_waited_for_and_named(tmp_path):
    slow = (
        "--learner=tests.system.learners.Faulty",
        "--learner.fault=slow build",
        f"--training.stall_timeout_s={STALL_S}",
    )
    with Job(tmp_path, "--devices=2", "--training.max_env_steps=800", *slow) as job:
        assert job.wait() == 0, job.text()
        assert "for rank 1; it is alive: building its learner" in job.text()
