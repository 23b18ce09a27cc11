"""A job that is judged while it runs."""

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.system.jobs import Job
from unilab_fabric.checkpoints import find_checkpoint, whole_checkpoints
from unilab_fabric.evaluations import mean_return, read_evaluations


def test_a_run_that_collapses_ends_with_its_best_checkpoint(tmp_path):
    arguments = [
        "--devices=2",
        "--task=tests.system.tasks.Pushed",
        "--learner=tests.system.learners.Collapsing",
        "--learner.updates_per_tick=1",
        "--learner.collapse_at=700",
        "--training.max_env_steps=16000",
        "--checkpoint.every=100",
        "--checkpoint.keep_last=1",
        "--evaluation.episodes=4",
    ]
    with Job(tmp_path, *arguments) as job:
        assert job.wait() == 0, job.text()
        assert job.all_gone()
    evaluations = read_evaluations(job.run)
    assert len(evaluations) >= 2
    returns = {one["tick"]: mean_return(one) for one in evaluations}
    best = max(returns, key=returns.get)
    assert returns[1000] < 0 < returns[best]  # the last one, at tick 1000, is of the collapsed policy
    left = [path.name for path in whole_checkpoints(job.run)]
    assert left == [f"tick-{best:09d}", "tick-000001000"]
    assert find_checkpoint("best", log_root=tmp_path / "runs", run_name=None).name == left[0]
    assert f"best checkpoint: runs/run/checkpoints/{left[0]}, return" in job.text()
    assert job.summary()["best_evaluation"]["tick"] == best
    events = EventAccumulator(str(job.run))
    events.Reload()
    logged = {event.step // 16: event.value for event in events.Scalars("Eval/return")}
    assert {tick: round(value, 3) for tick, value in logged.items()} == {
        tick: round(value, 3) for tick, value in returns.items()
    }
