"""Evaluations beside the loop: which checkpoints are judged, which are kept, and what the judge's end means."""

import math
import os
import signal
from types import SimpleNamespace

import pytest

from tests.test_exporting import checkpoint
from unilab_fabric.checkpoints import find_checkpoint
from unilab_fabric.config import EvaluationConfig
from unilab_fabric.errors import UserError
from unilab_fabric.evaluation import evaluate
from unilab_fabric.evaluations import best_evaluation, mean_return, read_evaluations
from unilab_fabric.hooks.evaluation import PeriodicEvaluation

SETTINGS = EvaluationConfig(episodes=4, episode_s=0.5, patience_s=60.0)


@pytest.fixture
def run(tmp_path):
    return SimpleNamespace(folder=tmp_path, tick=0, kept=set())


@pytest.fixture
def reports():
    return []


class Untold(PeriodicEvaluation):
    """Its judge is the test."""

    def __init__(self, reports, **changed):
        arguments = {"settings": SETTINGS, "cpus": None, "keep_best": True, **changed}
        super().__init__(arguments.pop("settings"), report=lambda *report: reports.append(report), **arguments)
        self.asked = []

    def _ask(self, path):
        self.asked.append(path.name)

    def answer(self, run, path, value):
        figure = {"mean": value, "low": value - 1, "high": value + 1}
        result = {"tick": int(path.name[-3:]), "env_steps": 8 * int(path.name[-3:]), "checkpoint": path.name}
        self._answers.put({**result, "figures": {"return": figure}})
        self.on_tick_end(run)


def checkpoints(run, *ticks):
    paths = [run.folder / "checkpoints" / f"tick-{tick:09d}" for tick in ticks]
    for path in paths:
        path.mkdir(parents=True)
    return paths


def test_the_newest_checkpoint_is_judged_and_those_in_between_are_left_out(run, reports):
    hook = Untold(reports)
    hook.on_start(run)
    first, second, third = checkpoints(run, 10, 20, 30)
    for path in (first, second, third):
        hook.on_checkpoint(run, path)
    assert hook.asked == [first.name]
    assert run.kept == {first, third}
    hook.answer(run, first, 5.0)
    assert hook.asked == [first.name, third.name]
    assert reports == [({"Eval/return": 5.0}, 80)]


def test_the_best_is_kept_after_a_collapse(run, reports):
    hook = Untold(reports)
    hook.on_start(run)
    paths = checkpoints(run, 10, 20, 30, 40)
    for path, value in zip(paths, (1.0, 7.0, 7.0, -3.0), strict=True):
        hook.on_checkpoint(run, path)
        hook.answer(run, path, value)
    assert run.kept == {paths[1]}
    assert best_evaluation(run.folder)["checkpoint"] == paths[1].name
    assert find_checkpoint(f"{run.folder}/best", log_root=run.folder, run_name=None) == paths[1]


def test_a_return_that_is_no_number_is_never_the_best(run, reports):
    hook = Untold(reports)
    hook.on_start(run)
    bad, good = checkpoints(run, 10, 20)
    for path, value in ((bad, math.nan), (good, -9.0)):
        hook.on_checkpoint(run, path)
        hook.answer(run, path, value)
    assert run.kept == {good}


def test_nothing_is_kept_where_the_best_is_not_wanted(run, reports):
    hook = Untold(reports, keep_best=False)
    hook.on_start(run)
    (path,) = checkpoints(run, 10)
    hook.on_checkpoint(run, path)
    assert run.kept == {path}  # while it is judged
    hook.answer(run, path, 1.0)
    assert run.kept == set()


def test_a_run_that_continues_from_an_older_checkpoint_forgets_the_later_ones(run, reports):
    before = Untold(reports)
    before.on_start(run)
    for path, value in zip(checkpoints(run, 10, 20, 30), (1.0, 2.0, 9.0), strict=True):
        before.on_checkpoint(run, path)
        before.answer(run, path, value)
    run.tick = 20
    Untold(reports).on_start(run)
    assert [one["tick"] for one in read_evaluations(run.folder)] == [10, 20]
    assert {path.name[-2:] for path in run.kept} == {"20"}


def test_half_a_line_of_a_killed_run_is_left_out(run, reports):
    hook = Untold(reports)
    (path,) = checkpoints(run, 10)
    hook.on_checkpoint(run, path)
    hook.answer(run, path, 1.0)
    with (run.folder / "evaluations.jsonl").open("a") as file:
        file.write('{"tick": 20, "figu')
    assert [one["tick"] for one in read_evaluations(run.folder)] == [10]


def test_a_completed_run_waits_no_longer_than_it_is_told(run, reports, capsys):
    hook = Untold(reports, settings=EvaluationConfig(episodes=4, patience_s=0.2))
    hook.on_start(run)
    (path,) = checkpoints(run, 10)
    hook.on_checkpoint(run, path)
    hook.on_end(run, "completed")
    assert f"warning: evaluation: {path.name} was not judged within 0.2 s" in capsys.readouterr().err


def test_no_best_is_known_of_a_run_without_evaluations_and_scores(run):
    with pytest.raises(UserError, match="there is no checkpoint under"):
        find_checkpoint(f"{run.folder}/best", log_root=run.folder, run_name=None)


# with the real process


@pytest.fixture
def real(run, reports):
    hook = PeriodicEvaluation(SETTINGS, cpus=None, keep_best=True, report=lambda *report: reports.append(report))
    hook.on_start(run)
    yield hook
    hook.on_end(run, "stopped")


def test_the_process_finds_what_the_command_finds(run, reports, real, capsys):
    path = checkpoint(run.folder, "FastSAC")
    real.on_checkpoint(run, path)
    real.on_end(run, "completed")
    (found,) = read_evaluations(run.folder)
    again = evaluate(path, episodes=4, episode_s=0.5, physics="faithful", seed=1)
    assert found["figures"] == again["figures"]
    assert reports[0][0]["Eval/return"] == mean_return(again)
    assert f"best checkpoint: {path}, return " in capsys.readouterr().err


def test_a_checkpoint_that_cannot_be_judged_is_a_warning_and_so_is_a_killed_process(run, reports, real, capsys):
    (broken,) = checkpoints(run, 10)
    real.on_checkpoint(run, broken)
    take_one(run, real)
    assert f"warning: evaluation: {broken.name} was not judged: ckpt_path is {broken}" in capsys.readouterr().err
    real._running = broken
    os.kill(real._process.pid, signal.SIGKILL)
    take_one(run, real)
    assert f"{broken.name} was not judged: the process ended with status -9" in capsys.readouterr().err
    path = checkpoint(run.folder, "FastSAC")
    real.on_checkpoint(run, path)  # by a new process
    take_one(run, real)
    assert len(reports) == 1


def take_one(run, hook):
    """Waits for an answer, and has the hook take it."""
    answer = hook._answers.get(timeout=60)
    hook._answers.put(answer)
    hook.on_tick_end(run)
