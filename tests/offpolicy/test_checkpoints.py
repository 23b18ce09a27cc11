"""Stop and resume, at every kind of tick, against a run that never stopped."""

import dataclasses

import pytest
import torch

from tests.offpolicy.runs import SMALL, run, weights
from unilab_fabric.checkpoints import read_manifest, whole_checkpoints
from unilab_fabric.config import CheckpointConfig
from unilab_fabric.hooks.hook import Hook
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.skips import SkippedSteps
from unilab_fabric.offpolicy.nonfinite import NonfiniteUpdates

torch.set_num_threads(1)
TICKS = 130
VARIANTS = {
    "n-step": dataclasses.replace(SMALL, n_step=3, normalize_observations=True),
    "small replay": dataclasses.replace(SMALL, replay_ticks=20, final_lr_fraction=0.1),
    "FlashSAC": FlashSAC(
        actor_width=8,
        critic_width=8,
        blocks=1,
        batch_size=32,
        updates_per_tick=2,
        replay_ticks=100,
        learning_starts=4,
    ),
    "random first": dataclasses.replace(SMALL, random_ticks=12, updates_per_tick=2),
}


class Recorder(Hook):
    """Keeps every report, times left out."""

    def __init__(self):
        self.reports = []

    def on_log(self, run, metrics):
        figures = {name: value for name, value in metrics.items() if not name.startswith("Perf/")}
        self.reports.append((run.tick, run.env_steps, figures))


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """For each variant: the runner of a run that never stopped, its reports, its last rank file."""
    found = {}
    for name, learner in VARIANTS.items():
        folder, recorder = tmp_path_factory.mktemp("straight"), Recorder()
        runner = run(folder, TICKS, learner=learner, hooks=[recorder])
        found[name] = runner, recorder.reports, rank_state(folder)
    return found


def rank_state(folder):
    return torch.load(whole_checkpoints(folder)[-1] / "rank-0.pt", weights_only=True)


def differing(first, second):
    return [name for name in first if not torch.equal(first[name], second[name])]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop", [1, 4, 5, 10, 21, 60, 129])
def test_a_stop_at_any_tick_leaves_no_trace(tmp_path, straight, variant, stop):
    """1: nothing is learnt yet; 4, 5: learning starts; 10, 60: a report; 21: a replay wraps; 129: one tick is left."""
    runner, reports, state = straight[variant]
    recorder = Recorder()
    common = {"learner": VARIANTS[variant], "hooks": [recorder]}
    first = run(tmp_path, TICKS, until=stop, **common)
    second = run(tmp_path, TICKS, resume=whole_checkpoints(tmp_path)[-1], **common)
    assert (first.tick, second.tick, second.env_steps) == (stop, runner.tick, runner.env_steps)
    assert differing(weights(runner), weights(second)) == []
    resumed = rank_state(tmp_path)
    for part in ("learner", "replay", "generators"):
        assert differing(state[part], resumed[part]) == []
    assert torch.equal(state["slot"][:-128], resumed["slot"][:-128])  # the last fields of a slot are times
    assert torch.equal(state["totals"], resumed["totals"])
    # a stop reports what there is, and so divides an interval in two; all other reports are the same
    divided = {stop, -(-stop // 10) * 10}
    kept = [report for report in recorder.reports if report[0] not in divided or stop % 10 == 0]
    assert [report for report in reports if report[0] not in divided or stop % 10 == 0] == kept


def test_a_run_continues_from_any_of_its_checkpoints_and_its_best_is_remembered(tmp_path, straight):
    runner, _, _ = straight["n-step"]
    checkpoint = CheckpointConfig(every=30, keep_last=3)
    run(tmp_path, TICKS, learner=VARIANTS["n-step"], until=100, checkpoint=checkpoint)
    older = whole_checkpoints(tmp_path)[-2]
    assert older.name == "tick-000000090"
    best = torch.load(older / "replicated.pt", weights_only=True)["best"]
    again = run(tmp_path, TICKS, learner=VARIANTS["n-step"], resume=older, checkpoint=checkpoint)
    assert differing(weights(runner), weights(again)) == []
    newest = torch.load(whole_checkpoints(tmp_path)[-1] / "replicated.pt", weights_only=True)["best"]
    assert best is None or newest[0] >= best[0]


class UpdatesPerTick(Hook):
    """Counts the updates of each tick."""

    def __init__(self):
        self.counts = []
        self._before = None

    def on_tick_end(self, run):
        now = run._cycle.updates
        if self._before is not None:
            self.counts.append(now - self._before)
        self._before = now


@pytest.mark.parametrize("replay", [True, False])
def test_a_resumed_run_never_makes_up_for_updates(tmp_path, replay):
    counting = UpdatesPerTick()
    learner = VARIANTS["random first"]
    run(tmp_path, TICKS, learner=learner, until=50, checkpoint=CheckpointConfig(every=0, replay=replay))
    run(tmp_path, TICKS, learner=learner, resume=whole_checkpoints(tmp_path)[-1], hooks=[counting])
    assert set(counting.counts) == ({2} if replay else {0, 2})
    assert counting.counts.count(0) == (0 if replay else learner.learning_starts - 1)


def test_the_manifest_says_how_far_the_run_has_come(tmp_path):
    runner = run(tmp_path, 12)
    manifest = read_manifest(whole_checkpoints(tmp_path)[-1])
    assert (manifest["tick"], manifest["env_steps"], manifest["updates"]) == (12, 96, 8)
    assert (manifest["world_size"], manifest["num_envs"], manifest["replay_ticks"]) == (1, 8, 11)
    assert manifest["train_s"] == pytest.approx(runner.train_s, abs=1.0)


def test_a_state_that_is_not_finite_is_not_saved(tmp_path):
    class Poison(Hook):
        def on_tick_end(self, run):
            if run.tick == 15:
                run._learner.replicated["actor/exp_avg"][3] = torch.nan

    with pytest.raises(NonfiniteUpdates, match=r"tick 20: no checkpoint was written, .* rank 0: actor, actor/exp_avg"):
        run(tmp_path, 40, hooks=[Poison()], checkpoint=CheckpointConfig(every=10), log_every=100)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["tick-000000010"]


def test_skipped_steps_in_a_row_survive_a_resume():
    from unilab_fabric.parallel.reduce import Ranks

    skipped = SkippedSteps(("critic", "actor"), Ranks(), torch.device("cpu"))
    for kept in (False, False, True, False):
        skipped.count("critic", torch.tensor(kept), torch.zeros(1))
    found = skipped.read()
    assert (found.total, found.in_row, found.by_rank) == (3, {"critic": 1, "actor": 0}, {"critic": [3], "actor": [0]})
    assert skipped.replicated().keys() == {"skipped_updates", "skipped_updates/in_row"}
