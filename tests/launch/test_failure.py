"""How failures are described, recorded and shown."""

import json

import pytest

from unilab_fabric.errors import PeerLost, PeerStalled, UserError, UserErrors
from unilab_fabric.launch.failure import FailedAt, failure_of, forget, record, show
from unilab_fabric.loop.collector import CollectorFailed


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_an_exception_is_described_with_its_traceback_and_tick(tmp_path):
    try:
        try:
            raise ValueError("nothing fits\nat all")
        except ValueError as error:
            raise FailedAt(41, tmp_path, lambda: None) from error
    except FailedAt as caught:
        failure = failure_of(caught, rank=2)
    assert (failure.rank, failure.tick, failure.exit_status) == (2, 41, 1)
    assert failure.reason == "ValueError: nothing fits"
    assert "test_failure.py" in failure.traceback
    assert "FailedAt" not in failure.traceback
    assert failure.text().splitlines()[-1] == "rank 2, tick 41: ValueError: nothing fits"
    assert not failure.consequence


def test_bad_input_found_by_a_rank_is_one_line_for_each_problem(capsys):
    problems = UserErrors([UserError("a", 1, "allowed: 2"), UserError("b", 3, "allowed: 4")])
    failure = failure_of(raised(problems), rank=0)
    assert failure.exit_status == 2
    show(failure)
    assert capsys.readouterr().err == "error: a is 1; allowed: 2\nerror: b is 3; allowed: 4\n"


def test_the_loss_of_a_peer_is_a_consequence_and_a_late_peer_is_the_one_that_failed():
    assert failure_of(raised(PeerLost("gone")), rank=0).consequence
    late = failure_of(raised(PeerStalled(3, "rank 3 did not arrive")), rank=0)
    assert (late.rank, late.consequence, late.reason) == (3, False, "rank 3 did not arrive")


@pytest.mark.parametrize(("status", "name"), [(137, "SIGKILL"), (1, None)])
def test_a_collector_s_end_is_its_own(status, name):
    error = CollectorFailed("rank 1: collector 7 failed", rank=1, pid=7, status=status, trace="Traceback\nBoom")
    failure = failure_of(raised(error), rank=1)
    assert (failure.process, failure.pid, failure.exit_status, failure.signal) == ("collector", 7, status, name)
    assert failure.text().splitlines() == ["Traceback", "Boom", "rank 1: collector 7 failed"]


def test_the_first_failure_is_recorded_and_the_summary_agrees(tmp_path):
    (tmp_path / "run_summary.json").write_text(json.dumps({"status": "completed", "ticks": 9}))
    record(failure_of(raised(ValueError("first")), rank=0), tmp_path)
    record(failure_of(raised(ValueError("second")), rank=1), tmp_path)
    assert json.loads((tmp_path / "failure.json").read_text())["reason"] == "ValueError: first"
    summary = json.loads((tmp_path / "run_summary.json").read_text())
    assert summary == {"status": "failed", "ticks": 9, "reason": "ValueError: first"}
    forget(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_failure_that_cannot_be_recorded_is_still_told(tmp_path, capsys):
    record(failure_of(raised(ValueError("first")), rank=0), tmp_path / "gone")
    assert "failure.json could not be written" in capsys.readouterr().err
