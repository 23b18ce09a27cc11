"""A logger that is slow or fails, beside a loop that goes on."""

import threading
import time
from types import SimpleNamespace

import pytest

from unilab_fabric.hooks import metrics
from unilab_fabric.hooks.hook import HookFailed, Hooks
from unilab_fabric.hooks.metrics import MetricsLogger


class Kept:
    """A logger that keeps what it is given, and can be held up or made to fail."""

    def __init__(self, fail_at=None):
        self.calls = []
        self.go_on = threading.Event()
        self.go_on.set()
        self._fail_at = fail_at

    def log_metrics(self, metrics, step):
        self.go_on.wait(20)
        if step == self._fail_at:
            raise ConnectionError("the server is gone")
        self.calls.append((step, metrics))

    def finalize(self, status):
        self.calls.append(status)


def report(hook, env_steps):
    hook.on_log(SimpleNamespace(env_steps=env_steps, tick=env_steps), {"a": float(env_steps)})


def test_reports_reach_the_logger_in_order_and_the_end_waits_for_them():
    logger = Kept()
    logger.go_on.clear()
    hook = MetricsLogger("kept", lambda: logger)
    for env_steps in (1, 2, 3):
        report(hook, env_steps)
    assert logger.calls == []  # and nobody has been held up
    threading.Timer(0.2, logger.go_on.set).start()
    hook.on_end(SimpleNamespace(), "stopped")
    assert logger.calls == [(1, {"a": 1.0}), (2, {"a": 2.0}), (3, {"a": 3.0}), "aborted"]


def test_a_report_is_copied_when_it_is_handed_over():
    logger, figures = Kept(), {"a": 1.0}
    logger.go_on.clear()
    hook = MetricsLogger("kept", lambda: logger)
    hook.on_log(SimpleNamespace(env_steps=1), figures)
    figures["a"] = -1.0
    logger.go_on.set()
    hook.on_end(SimpleNamespace(), "completed")
    assert logger.calls[0] == (1, {"a": 1.0})


def test_a_logger_that_does_not_start_is_told_of_once_and_loses_nothing(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "_NOTICE_S", 0.2)
    logger, may_start = Kept(), threading.Event()

    def build():
        may_start.wait(20)
        return logger

    hook = MetricsLogger("slow", build)
    report(hook, 1)
    time.sleep(0.3)
    report(hook, 2)
    report(hook, 3)
    told = capsys.readouterr().err
    assert told == "warning: the logger slow has not started within 0 s; training goes on, and its reports wait\n"
    may_start.set()
    hook.on_end(SimpleNamespace(), "completed")
    assert [step for step, _ in logger.calls[:-1]] == [1, 2, 3]


def test_a_logger_that_takes_nothing_any_more_does_not_hold_up_the_end(monkeypatch, capsys):
    monkeypatch.setattr(metrics, "_DRAIN_S", 0.3)
    logger = Kept()
    logger.go_on.clear()
    hook = MetricsLogger("stuck", lambda: logger)
    report(hook, 1)
    report(hook, 2)
    hook.on_end(SimpleNamespace(), "completed")
    assert "the logger stuck did not take 2 messages" in capsys.readouterr().err
    logger.go_on.set()


@pytest.mark.parametrize("fail_at", [None, 1])
def test_what_a_logger_raises_ends_the_job_at_the_next_report(fail_at):
    def build():
        if fail_at is None:
            raise ConnectionError("the server is gone")
        return Kept(fail_at)

    hook = MetricsLogger("lost", build)
    if fail_at is not None:
        report(hook, fail_at)
    hook._thread.join(5)
    with pytest.raises(HookFailed, match="hook MetricsLogger failed in on_log at tick 2: the server is gone"):
        Hooks([hook]).on_log(SimpleNamespace(env_steps=2, tick=2), {})
    with pytest.raises(ConnectionError):
        hook.on_end(SimpleNamespace(), "failed")
