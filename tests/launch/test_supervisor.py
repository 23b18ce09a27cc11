"""The launcher's judgement, with ranks that are small scripts: who failed first, and that nobody is left."""

import os
import signal
import sys
import time

import pytest

from unilab_fabric.launch.failure import Failure
from unilab_fabric.launch.supervisor import Supervisor

START = """
import os, signal, sys, time
from unilab_fabric.launch.failure import Failure
from unilab_fabric.launch.supervisor import Report
report, rank = Report(int(sys.argv[1])), int(os.environ["RANK"])
def fail(reason, consequence=False):
    report.failed(Failure(rank=rank, process="rank", pid=os.getpid(), exit_status=1, reason=reason,
                          consequence=consequence))
    os._exit(1)
"""


def outcome(folder, *scripts, deadline_s=30.0):
    """How a job ends whose ranks run these scripts."""
    environments = {
        rank: {**os.environ, "RANK": str(rank), "SCRIPT": START + script} for rank, script in enumerate(scripts)
    }
    command = "import os; exec(os.environ['SCRIPT'])"
    words = [sys.executable, "-c", command]
    supervisor = Supervisor(lambda pipe: [*words, str(pipe)], environments, None, folder, deadline_s)
    pids = [rank.process.pid for rank in supervisor._ranks.values()]
    try:
        return supervisor.run()
    finally:
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


def test_a_job_whose_ranks_are_done_ends_well_however_late_one_of_them_is(tmp_path):
    assert outcome(tmp_path, "report.done(0)", "time.sleep(1); report.done(0)") == 0


def test_a_rank_that_fails_is_the_cause_and_not_one_that_lost_it(tmp_path):
    lost = "fail('all_reduce could not finish', consequence=True)"
    failure = outcome(tmp_path, lost, "time.sleep(1); fail('the disk is gone')")
    assert (failure.rank, failure.reason, failure.exit_status) == (1, "the disk is gone", 1)


def test_a_killed_rank_is_named_with_its_signal_and_its_last_words(tmp_path):
    failure = outcome(
        tmp_path,
        "time.sleep(60)",
        "print('so long', file=sys.stderr, flush=True); os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert (failure.rank, failure.signal, failure.exit_status) == (1, "SIGKILL", 137)
    assert failure.last_lines == ("so long",)


@pytest.mark.parametrize("status", [0, 3])
def test_a_rank_that_leaves_without_a_word_has_failed_whatever_its_status(tmp_path, status):
    failure = outcome(tmp_path, f"os._exit({status})", "time.sleep(60)")
    assert failure.rank == 0
    assert failure.reason == f"it ended with exit status {status} before the run was over"
    assert failure.exit_status == (status or 1)


def test_a_consequence_without_a_cause_tells_what_the_others_do(tmp_path):
    failure = outcome(tmp_path, "fail('no process group', consequence=True)", "os.kill(os.getpid(), signal.SIGSTOP)")
    assert failure.reason.startswith("no process group; rank 1 (pid ")
    assert failure.reason.endswith(") was stopped")


def test_a_rank_that_does_not_end_when_asked_is_killed(tmp_path):
    stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    since = time.monotonic()
    failure = outcome(tmp_path, "time.sleep(0.5); fail('enough')", stubborn)
    assert failure.reason == "enough"
    assert time.monotonic() - since < 10


def test_a_rank_that_is_not_done_long_after_the_others_has_failed(tmp_path):
    failure = outcome(tmp_path, "report.done(0)", "time.sleep(60)", deadline_s=1.0)
    assert failure.rank == 1
    assert failure.reason == "it has not ended 1 s after the run was over"


def test_a_rank_that_was_asked_to_stop_takes_the_others_with_it(tmp_path):
    stopped = "time.sleep(0.5); report.done(128 + signal.SIGTERM); os._exit(143)"
    assert outcome(tmp_path, stopped, "time.sleep(60)") == 143


def test_a_signal_reaches_every_rank_once_and_a_failure_that_follows_from_it_is_none(tmp_path):
    waits = """
def stop(number, _):
    with open(f"got {rank}", "a") as file: file.write(f"{number} ")
    time.sleep(0.5)
    report.done(128 + number) if rank else fail('a peer is gone', consequence=True)
    os._exit(0)
signal.signal(signal.SIGINT, stop)
if rank == 0: os.kill(os.getppid(), signal.SIGINT)
time.sleep(60)
"""
    before = os.getcwd()
    os.chdir(tmp_path)
    try:
        assert outcome(tmp_path, "time.sleep(0.5)" + waits, waits) == 130
    finally:
        os.chdir(before)
    assert [(tmp_path / f"got {rank}").read_text() for rank in (0, 1)] == [f"{signal.SIGINT:d} "] * 2


def test_failures_are_told_whole(tmp_path):
    failure = outcome(tmp_path, "fail('x' * 200_000)")
    assert isinstance(failure, Failure)
    assert len(failure.reason) == 200_000
