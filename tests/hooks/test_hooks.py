import json
from functools import partial
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from unilab_fabric.config import ClassConfig
from unilab_fabric.hooks.hook import Hook, HookFailed, Hooks, RankFigures
from unilab_fabric.hooks.metrics import MetricsLogger, build_logger
from unilab_fabric.hooks.progress import Progress
from unilab_fabric.hooks.summary import Summary

TENSORBOARD = "lightning.fabric.loggers.TensorBoardLogger"


@pytest.fixture
def run(tmp_path):
    """A run of two ranks as hooks see it, at its start."""
    return SimpleNamespace(
        folder=tmp_path,
        tick=0,
        last_tick=100,
        env_steps=0,
        env_steps_per_tick=16,
        first_tick_at=None,
        stop_reason="",
        skipped_updates=0,
        rank_figures=(),
    )


def interval(seconds, env_steps, updates=10, wait=0.5):
    return RankFigures(seconds=seconds, env_steps=env_steps, updates=updates, phase_s={"wait": wait})


def test_metrics_stand_in_the_run_folder_on_the_axis_of_environment_steps(run):
    hook = MetricsLogger("it", partial(build_logger, ClassConfig(class_path=TENSORBOARD), run.folder))
    for run.env_steps, value in [(160, 1.5), (320, 2.5)]:
        hook.on_log(run, {"Train/mean_reward": value})
    hook.on_end(run, "completed")
    assert len(list(run.folder.glob("events.out.tfevents*"))) == 1
    events = EventAccumulator(str(run.folder))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("Train/mean_reward")] == [(160, 1.5), (320, 2.5)]


def test_a_resumed_run_hides_what_a_killed_one_reported_after_its_checkpoint(run):
    config = ClassConfig(class_path=TENSORBOARD)
    for purge_step, steps in [(None, (100, 200, 300)), (201, (250, 300))]:
        hook = MetricsLogger("it", partial(build_logger, config, run.folder, purge_step))
        for run.env_steps in steps:
            hook.on_log(run, {"a": 1.0 if purge_step is None else 2.0})
        hook.on_end(run, "failed")
    events = EventAccumulator(str(run.folder))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(100, 1), (200, 1), (250, 2), (300, 2)]


def test_a_logger_keeps_the_place_that_its_configuration_names(run, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    logger = build_logger(ClassConfig(class_path=TENSORBOARD, init_args={"root_dir": str(elsewhere)}), run.folder)
    assert str(logger.root_dir) == str(elsewhere)


def test_the_summary_adds_up_ranks_and_intervals(run):
    hook = Summary({"world_size": 2, "accelerator": "cpu"}, seed=7, started_at=1000.0)
    hook.on_start(run)
    run.rank_figures = (interval(2.0, 80), interval(2.0, 80))
    hook.on_log(run, {"Train/mean_reward": 1.0, "Train/mean_episode_length": 50.0})
    run.rank_figures = (interval(2.0, 80), interval(6.0, 80, wait=3.0))
    hook.on_log(run, {"Loss/critic": 0.5})  # no episode ended: the newest return stays
    run.env_steps, run.tick, run.first_tick_at, run.skipped_updates = 320, 20, 1003.5, 2
    hook.on_end(run, "completed")
    summary = json.loads((run.folder / "run_summary.json").read_text())
    assert summary["status"] == "completed"
    assert [rank["env_steps"] for rank in summary["ranks"]] == [160, 160]
    assert [rank["env_steps_per_sec"] for rank in summary["ranks"]] == [40.0, 20.0]
    assert [rank["seconds"]["wait"] for rank in summary["ranks"]] == [1.0, 3.5]
    assert summary["env_steps_per_sec"] == 60.0
    assert summary["mean_reward"] == 1.0
    assert summary["first_tick_s"] == 3.5
    assert summary["skipped_updates"] == 2
    assert summary["seeds"] == [7, 8]
    assert summary["versions"]["torch"]


def test_the_bar_shows_the_newest_return_until_there_is_another(run, capsys):
    hook = Progress()
    hook.on_start(run)
    run.env_steps = 800
    hook.on_log(run, {"Train/mean_reward": 12.345})
    hook.on_log(run, {})
    run.env_steps = 1600
    hook.on_log(run, {})
    hook.on_end(run, "completed")
    shown = capsys.readouterr().err
    assert "1.60k/1.60k" in shown.splitlines()[-1]
    assert "return=12.35" in shown.splitlines()[-1] or "return=12.34" in shown.splitlines()[-1]


def test_hooks_end_also_where_the_run_never_started(run):
    Hooks([Progress(), Summary({"world_size": 1}, seed=1, started_at=0.0)]).on_end(run, "failed")
    assert json.loads((run.folder / "run_summary.json").read_text())["status"] == "failed"


class Slip(Hook):
    """A hook with a mistake."""

    def on_start(self, run):
        raise KeyError("missing")


def test_a_failing_hook_is_named_with_its_method_and_tick(run):
    run.tick = 12
    with pytest.raises(HookFailed, match="hook Slip failed in on_start at tick 12: 'missing'"):
        Hooks([Hook(), Slip()]).on_start(run)
