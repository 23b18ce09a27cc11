"""Stop and resume, at every kind of tick, against a run that never stopped."""

import dataclasses
import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.offpolicy.runs import SMALL, run, weights
from tests.ranks import run_ranks
from tests.test_checkpoints import Hostile
from unilab_fabric.checkpoints import CheckpointWriter, fingerprint, read_manifest, verify, whole_checkpoints
from unilab_fabric.config import CheckpointConfig
from unilab_fabric.errors import UserError
from unilab_fabric.hooks.hook import Hook
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.learners.skips import SkippedSteps
from unilab_fabric.loop.collector import CollectorFailed
from unilab_fabric.loop.nonfinite import NonfiniteUpdates
from unilab_fabric.loop.report import Reporter

torch.set_num_threads(1)
TICKS = 130
SHORT = {"num_envs": 8, "episode_s": 0.3, "stagger": True}
"""Cart-poles whose episodes end all the time, by time limit."""
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
    """For each variant: the runner of a run that never stopped, its reports, its folder."""
    found = {}
    for name, learner in VARIANTS.items():
        folder, recorder = tmp_path_factory.mktemp("straight"), Recorder()
        checkpoint = CheckpointConfig(every=7, keep_last=100, keep_best=False)  # 7: mostly between two reports
        runner = run(folder, TICKS, init_args=SHORT, learner=learner, hooks=[recorder], checkpoint=checkpoint)
        found[name] = runner, recorder.reports, folder
    return found


def rank_state(folder, rank=0):
    return torch.load(whole_checkpoints(folder)[-1] / f"rank-{rank}.pt", weights_only=True)


def environments(folder, rank=0):
    with np.load(whole_checkpoints(folder)[-1] / f"rank-{rank}-envs.npz") as state:
        return dict(state)


def differing(first, second):
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(torch.as_tensor(first[name]), torch.as_tensor(second[name]))]


def assert_same_state(folder, other, rank=0):
    """The last checkpoints of two runs hold the same of a rank, and of the job."""
    first, second = rank_state(folder, rank), rank_state(other, rank)
    for part in ("replay", "generators", "learner"):
        assert differing(first[part] or {}, second[part] or {}) == []
    assert torch.equal(first["slot"][:-128], second["slot"][:-128])  # the last fields of a slot are times
    assert torch.equal(first["totals"], second["totals"])
    assert torch.equal(first["metrics"], second["metrics"])
    assert differing(environments(folder, rank), environments(other, rank)) == []
    before, after = (
        torch.load(whole_checkpoints(path)[-1] / "replicated.pt", weights_only=True) for path in (folder, other)
    )
    assert differing(before["learner"], after["learner"]) == []
    assert torch.equal(before["since_start"], after["since_start"])
    assert before["best"] == after["best"]
    manifests = [read_manifest(whole_checkpoints(path)[-1]) for path in (folder, other)]
    for name in ("tick", "env_steps", "updates", "replay_ticks", "score"):
        assert manifests[0][name] == manifests[1][name]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("stop", [1, 4, 5, 10, 21, 60, 129])
def test_a_stop_at_any_tick_leaves_no_trace(tmp_path, straight, variant, stop):
    """1: nothing is learnt yet; 4, 5: learning starts; 10, 60: a report; 21: a replay wraps; 129: one tick is left."""
    runner, reports, folder = straight[variant]
    recorder = Recorder()
    common = {"init_args": SHORT, "learner": VARIANTS[variant], "hooks": [recorder]}
    first = run(tmp_path, TICKS, until=stop, **common)
    second = run(tmp_path, TICKS, resume=whole_checkpoints(tmp_path)[-1], **common)
    assert (first.tick, second.tick, second.env_steps) == (stop, runner.tick, runner.env_steps)
    assert differing(weights(runner), weights(second)) == []
    for part in ("replay", "generators", "learner"):
        assert differing(rank_state(folder)[part], rank_state(tmp_path)[part]) == []
    assert differing(environments(folder), environments(tmp_path)) == []
    # a stop reports what there is, and so divides an interval in two; all other reports are the same
    divided = {stop, -(-stop // 10) * 10}
    kept = [report for report in recorder.reports if report[0] not in divided or stop % 10 == 0]
    assert [report for report in reports if report[0] not in divided or stop % 10 == 0] == kept


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("tick", [7, 42, 70, 126])
def test_a_killed_run_goes_on_from_any_checkpoint_and_reports_the_same(tmp_path, straight, variant, tick):
    """No interval is divided here: what was summed up to the checkpoint is in it. 42: a small replay has wrapped."""
    _, reports, folder = straight[variant]
    recorder = Recorder()
    checkpoint = CheckpointConfig(every=7, keep_last=100, keep_best=False)
    at = {"init_args": SHORT, "learner": VARIANTS[variant], "checkpoint": checkpoint, "hooks": [recorder]}
    resumed = run(tmp_path, TICKS, resume=folder / "checkpoints" / f"tick-{tick:09d}", **at)
    assert resumed.warning == ""
    assert recorder.reports == [report for report in reports if report[0] > tick]
    assert all("Train/mean_reward" in figures for _, _, figures in reports)
    assert_same_state(folder, tmp_path)


def scores(monkeypatch, figures):
    """Has the reports give these returns, one after the other."""
    figures, original = iter(figures), Reporter.report

    def report(self):
        found = original(self)
        found.metrics["Train/mean_reward"] = next(figures)
        return found

    monkeypatch.setattr(Reporter, "report", report)


def names(folder):
    return [path.name for path in whole_checkpoints(folder)]


def test_the_best_so_far_is_remembered_over_a_resume(tmp_path, monkeypatch):
    scores(monkeypatch, [1.0, 5.0, 2.0, 3.0, 4.0, 6.0])
    checkpoint = CheckpointConfig(every=10, keep_last=1)
    run(tmp_path, 60, until=30, checkpoint=checkpoint)
    assert names(tmp_path) == ["tick-000000020", "tick-000000030"]
    run(tmp_path, 60, until=50, checkpoint=checkpoint, resume=whole_checkpoints(tmp_path)[-1])
    assert names(tmp_path) == ["tick-000000020", "tick-000000050"]
    run(tmp_path, 60, checkpoint=checkpoint, resume=whole_checkpoints(tmp_path)[-1])
    assert names(tmp_path) == ["tick-000000060"]


def test_a_return_that_is_not_a_number_is_no_best(tmp_path, monkeypatch):
    scores(monkeypatch, [math.nan, 2.0, 1.0, 1.0])
    run(tmp_path, 40, checkpoint=CheckpointConfig(every=10, keep_last=1))
    assert names(tmp_path) == ["tick-000000020", "tick-000000040"]


def test_a_run_that_goes_back_to_an_older_checkpoint_keeps_what_it_writes_from_there(tmp_path):
    checkpoint = CheckpointConfig(every=10, keep_last=3, keep_best=False)
    run(tmp_path, TICKS, until=40, checkpoint=checkpoint)
    assert names(tmp_path) == ["tick-000000020", "tick-000000030", "tick-000000040"]
    again = run(tmp_path, TICKS, until=25, resume=whole_checkpoints(tmp_path)[0], checkpoint=checkpoint)
    assert again.warning == "later checkpoints go when this run writes its first: tick-000000030, tick-000000040"
    assert names(tmp_path) == ["tick-000000020", "tick-000000025"]


def test_another_run_may_start_from_a_checkpoint_and_leaves_those_after_it(tmp_path):
    checkpoint = CheckpointConfig(every=10, keep_last=3, keep_best=False)
    run(tmp_path / "a", TICKS, until=30, checkpoint=checkpoint)
    other = run(tmp_path / "b", TICKS, until=15, resume=whole_checkpoints(tmp_path / "a")[0], checkpoint=checkpoint)
    assert other.warning == ""
    assert names(tmp_path / "a") == ["tick-000000010", "tick-000000020", "tick-000000030"]


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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_leaves_no_half_file_of_the_environments_either(tmp_path, monkeypatch):
    left, opened = [], CheckpointWriter.open

    def open_on_a_full_disk(writer):
        opened(writer)
        left.append(writer.folder / "rank-0-envs.npz")
        left[0].symlink_to("/dev/full")

    monkeypatch.setattr(CheckpointWriter, "open", open_on_a_full_disk)
    with pytest.raises(CollectorFailed, match="No space left on device"):
        run(tmp_path, 20)
    assert not left[0].is_symlink()
    assert whole_checkpoints(tmp_path) == []


def resume_everywhere(ranks, folder, ticks, stops):
    """On each rank of a job: a straight run with checkpoints, and from some of them resumed ones."""
    recorder, learner = Recorder(), VARIANTS["n-step"]
    common = {
        "init_args": SHORT,
        "learner": learner,
        "ranks": ranks,
        "checkpoint": CheckpointConfig(every=7, keep_last=100, keep_best=False),
    }
    run(folder / "straight", ticks, hooks=[recorder], **common)
    found = [recorder.reports]
    for stop in stops:
        recorder = Recorder()
        path = folder / "straight" / "checkpoints" / f"tick-{stop:09d}"
        run(folder / str(stop), ticks, resume=path, hooks=[recorder], **common)
        found.append(recorder.reports)
    return found


def test_two_ranks_go_on_from_any_checkpoint_as_if_nothing_had_been(tmp_path):
    stops = [7, 28, 63]
    reports = run_ranks(resume_everywhere, [(tmp_path, 70, stops)] * 2)
    assert reports[0] == reports[1]
    straight, *resumed = reports[0]
    for stop, found in zip(stops, resumed, strict=True):
        assert found == [report for report in straight if report[0] > stop]
        for rank in range(2):
            assert_same_state(tmp_path / "straight", tmp_path / str(stop), rank)


COUNTING = "tests.offpolicy.counting.CountingEnv"
ENVS = 12
BEFORE, AFTER = 17, 34  # ticks; the longest episodes of the counting environment last 3 + 11


def count(ranks, folder, ticks, options):
    """A job on the counting environment, whose observations name the job's environment; returns updates by tick."""
    own = ENVS // ranks.world_size
    counting = UpdatesPerTick()
    runner = run(
        folder,
        ticks,
        task=COUNTING,
        init_args={"num_envs": own, "first_env": own * ranks.rank},
        learner=dataclasses.replace(SMALL, n_step=2),
        ranks=ranks,
        hooks=[counting],
        **options,
    )
    return counting.counts, runner.warning


def stored(path):
    """Every transition in the replays of a checkpoint, by tick and environment of the job; each only once."""
    found = {}
    for rank in range(read_manifest(path)["world_size"]):
        state = torch.load(path / f"rank-{rank}.pt", weights_only=True)["replay"]
        oldest, newest, tail, _ = state["counters"].tolist()
        for tick in range(oldest, newest):
            row, after = state["rows"][tick - oldest], state["rows"][tick - oldest + 1]
            for column, final in enumerate(state["final_index"][tick - oldest].tolist()):
                last = state["finals"][(final - tail) % int(state["finals_capacity"])] if final >= 0 else after[column]
                place = tick, int(row[column, 1])
                assert place not in found
                found[place] = (*row[column].tolist(), *last[:4].tolist(), final >= 0)
    return found


def truth(ranks, start, end, cut):
    """The same of a job whose environments began at tick `start`, told plainly; the action is not known."""
    own = ENVS // ranks
    found = {}
    for env in range(ENVS):
        steps, length = 0, 3 + env % own
        for tick in range(start, end):
            reached = steps + 1
            ended = reached == length
            terminated = float(ended and env % own % 2 == 1)
            seen = (float(steps), float(env)) * 2
            found[tick, env] = (*seen, reached, terminated, *(float(reached), float(env)) * 2, ended or tick == cut)
            steps = 0 if ended else reached
    return found


def without_action(transitions):
    return {place: (*one[:4], *one[5:]) for place, one in transitions.items()}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_ranks_keeps_every_transition_as_it_was(tmp_path, before, after):
    run_ranks(count, [(tmp_path, BEFORE, {})] * before)
    (path,) = whole_checkpoints(tmp_path)
    old = stored(path)
    assert without_action(old) == truth(before, 0, BEFORE - 1, cut=None)
    results = run_ranks(count, [(tmp_path, AFTER, {"resume": path})] * after)
    new = stored(whole_checkpoints(tmp_path)[-1])
    # the last stored transition ends like a time-out, and the new environments begin in the row that it led to
    kept, anew = truth(before, 0, BEFORE - 1, cut=BEFORE - 2), truth(after, BEFORE - 1, AFTER - 2, cut=None)
    assert without_action(new) == kept | anew
    assert {place: one[4] for place, one in new.items() if place in old} == {
        place: one[4] for place, one in old.items()
    }
    for counts, warning in results:
        assert set(counts) == {1}  # replay is full enough at once, and nothing is made up for
        assert "replicated state and replay continue" in warning


def edited(path, name, change):
    """Changes a part of a checkpoint as somebody would who knows the format: size and CRC-32 are right again."""
    state = torch.load(path / name, weights_only=True)
    change(state)
    torch.save(state, path / name)
    list_anew(path, name)


def list_anew(path, name):
    file = path / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"][name] = fingerprint(path / name)
    file.write_text(json.dumps(manifest))
    verify(path)


def drop_a_tick(state):
    state["replay"]["counters"][0] += 1


@pytest.mark.parametrize(
    ("name", "change", "told"),
    [
        ("rank-0.pt", drop_a_tick, r"rank-0\.pt; its replay holds 10 ticks, and replay_ticks in the manifest is 11"),
        ("rank-0.pt", lambda state: state.update(replay=None), r"rank-0\.pt; its replay holds 0 ticks"),
        ("rank-0.pt", lambda state: state.update(slot=None), r"its slot and rank-0-envs\.npz belong together"),
        ("rank-0.pt", lambda state: state["generators"].pop("noise"), r"rank-0\.pt; .*: noise stands on one side only"),
        (
            "rank-0.pt",
            lambda state: state.update(totals=torch.zeros(1, 2)),
            r"rank-0\.pt; totals is torch\.float32 \(1, 2",
        ),
        ("rank-0.pt", lambda state: state.pop("metrics"), r"rank-0\.pt; it holds no metrics"),
        ("replicated.pt", lambda state: state.pop("layouts"), r"replicated\.pt; it holds no layouts"),
        (
            "replicated.pt",
            lambda state: state.update(since_start=torch.zeros(2)),
            r"replicated\.pt; since_start is torch",
        ),
    ],
)
def test_a_part_that_does_not_fit_is_refused_by_file_and_field(tmp_path, name, change, told):
    run(tmp_path, 30, until=12)
    (path,) = whole_checkpoints(tmp_path)
    edited(path, name, change)
    with pytest.raises(UserError, match=told) as caught:
        run(tmp_path, 30, resume=path)
    assert "\n" not in str(caught.value)


def test_generators_of_another_kind_of_device_start_anew_and_the_rest_continues(tmp_path):
    run(tmp_path, 30, until=12)
    (path,) = whole_checkpoints(tmp_path)
    on_cuda = torch.zeros(16, dtype=torch.uint8)  # as large as the state of a CUDA generator
    edited(path, "rank-0.pt", lambda state: state.update(generators=dict.fromkeys(state["generators"], on_cuda)))
    resumed = run(tmp_path, 30, resume=path)
    assert resumed.warning == "the checkpoint holds no generators for this kind of device: these start anew"
    assert int(weights(resumed)["updates"]) == 30 - SMALL.learning_starts


def test_environments_of_a_checkpoint_cannot_run_code(tmp_path):
    run(tmp_path, 30, until=12)
    (path,) = whole_checkpoints(tmp_path)
    file, target = path / "rank-0-envs.npz", tmp_path / "owned"
    with np.load(file) as state:
        np.savez(file, **{**state, "totals": np.array([Hostile(target)], dtype=object)})
    list_anew(path, file.name)
    with pytest.raises(CollectorFailed, match="allow_pickle=False"):
        run(tmp_path, 30, resume=path)
    assert not target.exists()


PAGE = Path(__file__).parents[2] / "docs/checkpoints.md"


def documented():
    """The keys of the page's table by file; a star stands for any name between two slashes."""
    rows = re.findall(r"^\| `(\S+)` \| (`.+?`) \|", PAGE.read_text(), flags=re.MULTILINE)
    return [(file, key) for file, keys in rows for key in re.findall(r"`(.+?)`", keys)]


def leaves(state, path=""):
    """The places of everything in a part of a checkpoint that is no dict."""
    for name, value in state.items():
        place = f"{path}{name}"
        if isinstance(value, dict):
            yield from leaves(value, f"{place}/")
        else:
            yield place


def keys_of(path):
    manifest = json.loads((path / "manifest.json").read_text())
    found = {("manifest.json", name) for name in manifest}
    for name in ("replicated.pt", "rank-0.pt"):
        state = torch.load(path / name, weights_only=True)
        found |= {(name.replace("0", "<r>"), place) for place in leaves(state)}
    with np.load(path / "rank-0-envs.npz") as state:
        return found | {("rank-<r>-envs.npz", name) for name in state}


def test_the_page_on_checkpoints_lists_everything_that_is_in_one(tmp_path, straight):
    go2 = {"num_envs": 8, "randomization": {}, "noise": {}, "pushes": {}}
    run(tmp_path, 6, task="Go2JoystickFlat", init_args=go2)
    ppo = PPO(actor_hidden=(8,), critic_hidden=(8,), num_steps_per_env=6)
    run(tmp_path / "walk", 6, task="G1WalkFlat", learner=ppo)
    run(tmp_path / "track", 6, task="G1MotionTracking")
    others = (straight[variant][2] for variant in ("n-step", "FlashSAC"))
    folders = [tmp_path, tmp_path / "walk", tmp_path / "track", *others]
    held = set().union(*(keys_of(whole_checkpoints(folder)[-1]) for folder in folders))
    rows = documented()
    matches = {
        row: {
            key for key in held if key[0] == row[0] and re.fullmatch(re.escape(row[1]).replace(r"\*", "[^/]+"), key[1])
        }
        for row in rows
    }
    assert [row for row in rows if not matches[row]] == []  # nothing that is not there
    assert sorted(held - set().union(*matches.values())) == []  # and nothing forgotten


def test_skipped_steps_in_a_row_survive_a_resume():
    from unilab_fabric.parallel.reduce import Ranks

    skipped = SkippedSteps(("critic", "actor"), Ranks(), torch.device("cpu"))
    for kept in (False, False, True, False):
        skipped.count("critic", torch.tensor(kept), torch.zeros(1))
    found = skipped.read()
    assert (found.total, found.in_row, found.by_rank) == (3, {"critic": 1, "actor": 0}, {"critic": [3], "actor": [0]})
    assert skipped.replicated().keys() == {"skipped_updates", "skipped_updates/in_row"}
