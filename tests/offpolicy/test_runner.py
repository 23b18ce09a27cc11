import json

import pytest
import torch

from tests.offpolicy.runs import SMALL, run, weights
from unilab_fabric.checkpoints import whole_checkpoints
from unilab_fabric.config import CheckpointConfig
from unilab_fabric.errors import UserError
from unilab_fabric.hooks.hook import Hook, HookFailed

torch.set_num_threads(1)
COUNTING = "tests.offpolicy.counting.CountingEnv"


def same(first, second):
    assert first.keys() == second.keys()
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    assert not differing, f"not bitwise equal: {differing}"


def test_the_same_seed_gives_the_same_bits_also_with_a_slow_collector(tmp_path):
    quick = run(tmp_path / "a", 200, task=COUNTING, init_args={"num_envs": 8})
    again = run(tmp_path / "b", 200, task=COUNTING, init_args={"num_envs": 8})
    slow = run(tmp_path / "c", 200, task=COUNTING, init_args={"num_envs": 8, "slow_s": 0.01})
    other = run(tmp_path / "d", 200, task=COUNTING, init_args={"num_envs": 8}, seed=4)
    same(weights(quick), weights(again))
    same(weights(quick), weights(slow))
    assert not torch.equal(weights(quick)["actor"], weights(other)["actor"])


@pytest.mark.parametrize("stop", [3, 37, 150])
def test_stopping_and_resuming_equals_never_having_stopped(tmp_path, stop):
    straight = run(tmp_path / "straight", 200)
    first = run(tmp_path / "split", 200, until=stop)
    assert first.tick == stop
    second = run(tmp_path / "split", 200, resume=whole_checkpoints(tmp_path / "split")[-1])
    assert second.warning == ""
    assert second.env_steps == straight.env_steps == 200 * 8
    same(weights(straight), weights(second))
    final = torch.load(whole_checkpoints(tmp_path / "straight")[-1] / "rank-0.pt", weights_only=True)
    resumed = torch.load(whole_checkpoints(tmp_path / "split")[-1] / "rank-0.pt", weights_only=True)
    same(final["replay"], resumed["replay"])
    same(final["generators"], resumed["generators"])
    assert torch.equal(final["totals"], resumed["totals"])


def test_without_replay_updates_wait_until_it_has_filled_again(tmp_path):
    first = run(tmp_path, 60, checkpoint=CheckpointConfig(every=0, replay=False))
    updates = int(weights(first)["updates"])
    assert updates == 60 - SMALL.learning_starts
    second = run(tmp_path, 80, resume=whole_checkpoints(tmp_path)[-1])
    assert "no replay" in second.warning
    assert int(weights(second)["updates"]) == updates + 20 - SMALL.learning_starts


def test_environments_without_state_start_anew_and_the_rest_continues(tmp_path):
    task = {"task": COUNTING, "init_args": {"num_envs": 8}}
    first = run(tmp_path, 30, **task)
    second = run(tmp_path, 50, resume=whole_checkpoints(tmp_path)[-1], **task)
    assert second.warning == "the checkpoint holds no environments: these start anew"
    assert second.tick == 50
    assert int(weights(second)["updates"]) > int(weights(first)["updates"])


def test_no_update_comes_before_learning_starts(tmp_path):
    assert int(weights(run(tmp_path / "a", SMALL.learning_starts))["updates"]) == 0
    assert int(weights(run(tmp_path / "b", SMALL.learning_starts + 1))["updates"]) == 1


class Collapsing(Hook):
    """Pretends that the return falls after tick 30."""

    def __init__(self):
        self.written = []

    def on_checkpoint(self, run, path):
        self.written.append(path.name)


def test_the_newest_and_the_best_checkpoints_are_kept(tmp_path, monkeypatch):
    scores = iter([1.0, 5.0, 2.0, 3.0, 0.0, 0.5])
    watch = Collapsing()
    from unilab_fabric.loop.report import Reporter

    original = Reporter.report

    def scored(self):
        report = original(self)
        report.metrics["Train/mean_reward"] = next(scores)
        return report

    monkeypatch.setattr(Reporter, "report", scored)
    run(tmp_path, 60, hooks=[watch], checkpoint=CheckpointConfig(every=10, keep_last=2))
    assert watch.written == [f"tick-{tick:09d}" for tick in range(10, 70, 10)]
    kept = whole_checkpoints(tmp_path)
    assert [path.name for path in kept] == ["tick-000000020", "tick-000000050", "tick-000000060"]
    assert json.loads((kept[0] / "manifest.json").read_text())["score"] == 5.0


class Broken(Hook):
    """Fails at the first report."""

    def on_log(self, run, metrics):
        raise ValueError("the tracker is gone")


def test_a_failing_hook_is_named(tmp_path):
    with pytest.raises(HookFailed, match="hook Broken failed in on_log at tick 10: the tracker is gone"):
        run(tmp_path, 20, hooks=[Broken()])


def test_a_checkpoint_of_another_learner_is_refused_with_the_tensors_that_differ(tmp_path):
    import dataclasses

    run(tmp_path, 10)
    other = dataclasses.replace(SMALL, actor_hidden=(64, 16))
    with pytest.raises(UserError, match=r"in actor there is linears\.0\.weight \(1, 32, 5\)"):
        run(tmp_path, 20, learner=other, resume=whole_checkpoints(tmp_path)[-1])


class Recorder(Hook):
    """Keeps every report."""

    def __init__(self):
        self.reports = []

    def on_log(self, run, metrics):
        self.reports.append((run.env_steps, dict(metrics)))


def test_reports_tell_what_the_environments_did(tmp_path):
    """Episodes of three, four and five steps whose rewards are 1, 2, ...: returns 6, 10 and 15."""
    watch = Recorder()
    run(tmp_path, 60, task=COUNTING, init_args={"num_envs": 3}, hooks=[watch], log_every=60)
    ((steps, metrics),) = watch.reports
    assert steps == 180
    # 59 transitions have been handed over: 19 episodes of three steps, 14 of four, 11 of five
    assert metrics["Train/mean_reward"] == pytest.approx((19 * 6 + 14 * 10 + 11 * 15) / 44)
    assert metrics["Train/mean_episode_length"] == pytest.approx((19 * 3 + 14 * 4 + 11 * 5) / 44)


def test_what_nobody_counted_is_absent(tmp_path):
    watch = Recorder()
    run(tmp_path, 4, task=COUNTING, init_args={"num_envs": 8, "episode_length": 50}, hooks=[watch], log_every=2)
    assert all("Train/mean_reward" not in metrics for _, metrics in watch.reports)
    assert all("Loss/critic" not in metrics for _, metrics in watch.reports)  # learning has not started
