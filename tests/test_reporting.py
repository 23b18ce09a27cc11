import json
import math
import os
import sys
from pathlib import Path

import pytest

from tests.manifests import cartpole_run, write_finished_run, write_reports
from unilab_fabric import cli
from unilab_fabric.config import save_run_config
from unilab_fabric.reporting.limits import estimates, find_limit, two_digits
from unilab_fabric.reporting.runs import read_curves, read_run
from unilab_fabric.reporting.text import compare, differences, plain, run_text

# milliseconds; each learner's phases and 0.2 ms of other work fill its tick
PHYSICS_LIMITS = {
    "tick": 10.0, "wait": 5.3, "commit": 0.2, "act": 0.3, "update": 4.0, "physics": 9.0, "collector_wait": 1.0,
}  # fmt: skip
UPDATE_LIMITS = {
    "tick": 10.0, "wait": 0.1, "commit": 0.2, "act": 0.3, "update": 9.2, "physics": 4.0, "collector_wait": 6.0,
}  # fmt: skip


@pytest.fixture
def run_of(tmp_path):
    """A run that has been read back from its files, one tick in milliseconds for each rank."""

    def build(*ticks_ms, learner="FastSAC", name="a_run", topology=None, **changes):
        config = cartpole_run(learner={"class_path": learner})
        if topology is not None:
            ranks = {"devices": list(range(len(ticks_ms))), "num_nodes": 1, "accelerator": "cpu"}
            changes["topology"] = ranks | topology
        write_finished_run(tmp_path / name, config, ticks_ms, **changes)
        return read_run(tmp_path / name)

    return build


@pytest.fixture
def report(tmp_path, monkeypatch, capsys):
    """The command, run in a folder: exit status, standard output, lines on standard error."""
    monkeypatch.chdir(tmp_path)

    def run(*tokens):
        status = cli.main(["report", *map(str, tokens)])
        out, err = capsys.readouterr()
        return status, out, err.splitlines()

    return run


# what limits


def test_physics_limits_where_the_learner_waits(run_of):
    limit = find_limit(run_of(PHYSICS_LIMITS))
    assert limit.name == "physics"
    assert limit.text == "Physics limits: 9.0 ms of a tick of 10 ms, and the learner waits for it 5.3 ms"


def test_the_update_limits_where_the_collector_waits(run_of):
    limit = find_limit(run_of(UPDATE_LIMITS))
    assert limit.name == "update"
    # 10 - 4 of physics - 0.5 of commit and act
    assert limit.text == "The update limits: 9.2 ms of a tick of 10 ms, and the collector is idle for 5.5 ms"


def test_the_wait_before_the_first_tick_is_no_part_of_the_collectors_tick(run_of):
    run = run_of({**PHYSICS_LIMITS, "collector_wait": 500.0})
    assert find_limit(run).name == "physics"
    assert plain([run])["runs"][0]["ticks"][0]["collector_wait"] == pytest.approx(1e-3)


def test_the_longest_part_of_the_collector_s_work_is_named(run_of):
    split = {**PHYSICS_LIMITS, "physics": 3.0, "rewards": 5.5, "copy": 0.5}
    limit = find_limit(run_of(split))
    assert limit.name == "rewards"
    assert limit.text == (
        "What the collector does limits: 9.0 ms of a tick of 10 ms, most of it what follows physics (rewards, "
        "observations, resets), and the learner waits for it 5.3 ms"
    )
    limit = find_limit(run_of({**split, "physics": 6.0, "rewards": 2.5}, name="b"))
    assert limit.text.startswith("Physics limits: 9.0 ms")


def test_neither_limits_alone_where_both_wait_alike(run_of):
    limit = find_limit(run_of({**PHYSICS_LIMITS, "wait": 1.2, "update": 8.1, "physics": 8.4}))
    assert limit.name == "even"
    assert "(1.2 ms and 1.1 ms)" in limit.text


def test_inference_limits_where_it_is_longer_than_what_it_holds_up(run_of):
    tick = {**PHYSICS_LIMITS, "wait": 0.1, "act": 6.0, "update": 3.0, "physics": 3.0}
    assert find_limit(run_of(tick)).name == "act"


def test_what_is_done_between_ticks_limits(run_of):
    limit = find_limit(run_of({**PHYSICS_LIMITS, "wait": 0.5, "update": 4.0, "physics": 4.0}))
    assert (limit.name, "5.0 ms of a tick" in limit.text) == ("other", True)


def test_a_single_core_for_collector_and_learner_is_named(run_of):
    run = run_of(UPDATE_LIMITS, topology={"cpus": [[3]]})
    limit = find_limit(run)
    assert limit.name == "one core"
    assert "take turns on core 3" in limit.text
    # 9.5 ms beside commit and act: 4/13.2 of it physics
    assert "the update 6.6 ms of it, physics 2.9 ms" in limit.text
    assert find_limit(run_of(UPDATE_LIMITS, topology={"cpus": [[3, 4]]}, name="more")).name == "update"


def test_the_phases_of_ppo_take_turns(run_of):
    tick = {**PHYSICS_LIMITS, "wait": 5.3, "update": 4.0}
    limit = find_limit(run_of(tick, learner="PPO"))
    assert (limit.name, limit.text.startswith("Physics limits: 5.3 ms")) == ("physics", True)
    assert find_limit(run_of({**tick, "wait": 3.9, "update": 5.4}, learner="PPO", name="b")).name == "update"


@pytest.mark.parametrize(("physics", "name"), [(9.5, "physics"), (4.0, "update")])
def test_on_cuda_only_the_idle_collector_tells(run_of, physics, name):
    tick = {**PHYSICS_LIMITS, "wait": 8.0, "update": 0.5, "act": 1.0, "physics": physics}
    topology = {"accelerator": "cuda", "cpus": [[0, 1]]}
    assert find_limit(run_of(tick, topology=topology)).name == name


# stragglers and all-reduces


def test_a_rank_with_slower_physics_is_named_with_its_cores(run_of):
    fast = {**UPDATE_LIMITS, "physics": 5.0}
    limit = find_limit(run_of(fast, PHYSICS_LIMITS, fast))
    assert (limit.name, limit.rank) == ("straggler", "rank 1")
    assert limit.text == (
        "Rank 1 on cores 2-3 holds the others up: physics takes it 9.0 ms in each tick, "
        "where the others' median is 5.0 ms."
    )


def test_a_straggler_on_another_machine_is_named_with_it(run_of):
    fast = {**UPDATE_LIMITS, "physics": 5.0}
    topology = {"devices": [0, 1], "num_nodes": 2, "cpus": [[0, 1], [2, 3]]}
    limit = find_limit(run_of(fast, fast, fast, PHYSICS_LIMITS, topology=topology))
    assert limit.text.startswith("Rank 3 on machine 1 holds")


def test_nobody_waits_for_slower_physics_beside_longer_updates(run_of):
    slower = {**UPDATE_LIMITS, "physics": 6.0}
    assert find_limit(run_of(UPDATE_LIMITS, slower)).name == "update"


def test_equal_ranks_have_no_straggler(run_of):
    limit = find_limit(run_of(PHYSICS_LIMITS, {**PHYSICS_LIMITS, "physics": 9.3}))
    assert (limit.name, limit.rank) == ("physics", "")


def test_a_straggler_of_ppo_holds_up_a_rollout_however_short(run_of):
    fast = {**PHYSICS_LIMITS, "physics": 2.0, "wait": 2.0, "update": 7.3}
    slow = {**PHYSICS_LIMITS, "physics": 3.0, "wait": 3.0, "update": 6.3}
    assert find_limit(run_of(fast, slow, learner="PPO")).rank == "rank 1"


def test_with_an_all_reduce_phase_a_slower_update_is_seen(run_of):
    fast = {**UPDATE_LIMITS, "update": 5.0, "all_reduce": 4.2}
    slow = {**UPDATE_LIMITS, "update": 8.8, "all_reduce": 0.4}
    limit = find_limit(run_of(fast, fast, slow))
    assert limit.rank == "rank 2"
    assert "the update takes it 8.8 ms in each tick, where the others' median is 5.0 ms" in limit.text


def test_slower_rewards_hold_the_others_up_as_slower_physics_does(run_of):
    fast = {**UPDATE_LIMITS, "physics": 5.0, "rewards": 1.0}
    assert find_limit(run_of(fast, {**PHYSICS_LIMITS, "physics": 5.0, "rewards": 4.0})).rank == "rank 1"


def test_the_all_reduce_limits(run_of):
    tick = {**UPDATE_LIMITS, "update": 3.2, "all_reduce": 6.0}
    limit = find_limit(run_of(tick, tick))
    assert limit.name == "all_reduce"
    assert limit.text.startswith("All-reduce limits: 6.0 ms of a tick of 10 ms")


# what would help


def gains(run):
    return [pytest.approx(one.gain, abs=5e-4) for one in estimates(run)]


def test_estimates_where_physics_limits(run_of):
    # 10 = 0.5 commit and act + 9 + 0.5 slack; cores: 0.5 + 4.5 + 0.5; environments: 1 + 18 + 0.5 for twice the steps
    run = run_of(PHYSICS_LIMITS)
    assert gains(run) == [10 / 5.5, 20 / 19.5, 2.0]
    assert estimates(run)[1].updates_gain == pytest.approx(10 / 19.5)
    assert "learns differently" in estimates(run)[1].assumption


def test_estimates_where_the_update_limits(run_of):
    # 10 = 0.5 + 9.2 + 0.3 slack; cores do nothing; environments: 1 + max(8, 9.2) + 0.3
    assert gains(run_of(UPDATE_LIMITS, UPDATE_LIMITS)) == [1.0, 20 / 10.5, 1.5]


def test_halved_physics_gains_no_more_than_down_to_the_update(run_of):
    # 10 = 0.5 + 9 + 0.5 slack, with an update of 8: 0.5 + 8 + 0.5
    assert gains(run_of({**PHYSICS_LIMITS, "wait": 1.3, "update": 8.0}))[0] == 10 / 9


def test_estimates_of_ppo(run_of):
    # physics 9, of which 8 are waited for: 4.5 would be waited for 3.5; twice everything: 2 * 9.5 + 0.5 slack
    run = run_of({**PHYSICS_LIMITS, "wait": 8.0, "update": 1.0}, learner="PPO")
    assert gains(run) == [10 / 5.5, 20 / 19.5, 2.0]


def test_estimates_of_ranks_with_one_core(run_of):
    # 9.5 ms in proportion 4 : 9.2; apart only the longer one counts
    run = run_of(UPDATE_LIMITS, topology={"cpus": [[0]]})
    physics, update = 9.5 * 4 / 13.2, 9.5 * 9.2 / 13.2
    assert gains(run)[:2] == [10 / (0.5 + update), 20 / (1.0 + 2 * physics + update)]


def test_the_measured_wait_for_the_slowest_rank_is_told(run_of):
    run = run_of(PHYSICS_LIMITS, {**PHYSICS_LIMITS, "physics": 8.6})
    assert "the wait for the slowest rank (0.2 ms a tick)" in estimates(run)[2].assumption


@pytest.mark.parametrize(
    ("value", "text"), [(25733.0, "26,000"), (10.0, "10"), (9.96, "10"), (9.94, "9.9"), (0.123, "0.12"), (0.0, "0")]
)
def test_two_digits(value, text):
    assert two_digits(value) == text


# what was read


def test_rate_return_and_times_come_from_the_files(run_of):
    run = run_of(PHYSICS_LIMITS, rates=(1000.0, 2000.0, 4000.0, 5000.0))
    assert (run.rate, run.final_return, run.learner, run.task) == (4500.0, 40.0, "FastSAC", "CartpoleSwingup")
    assert run.curves.seconds == [1.0, 1.5, 1.75, 1.95]
    text = run_text(run)
    assert "4,500 env steps/s" in text
    assert "4,000 env steps in 30 s, the first tick after 1.5 s; final return 40" in text
    (row,) = [line for line in text.splitlines() if line.startswith("rank 0")]
    cells = "rank 0, cores 0-1 10.00 9.00 90% 1.00 10% | 5.30 53% 0.20 2% 0.30 3% 4.00 40% 0.20 2%"
    assert " ".join(row.split()) == cells


def test_a_table_of_reports_is_read_up_to_the_half_row_of_a_kill(tmp_path):
    table = "env_steps,Perf/env_steps_per_sec,Train/mean_reward\n100,50.0,\n200,100.0,7.5\n300,10"
    (tmp_path / "metrics.csv").write_text(table)
    curves = read_curves(tmp_path)
    assert curves.env_steps == [100, 200]
    assert curves.seconds == [2.0, 3.0]
    assert curves.last("Train/mean_reward") == 7.5


def test_times_of_a_resumed_run_are_of_its_own_ticks(run_of):
    # twice as many steps and ticks as this process has made
    resumed = run_of(PHYSICS_LIMITS, env_steps=8000, ticks=125)
    assert resumed.ranks[0].tick_s == pytest.approx(10e-3)
    assert resumed.ranks[0].phase_s["physics"] == pytest.approx(9e-3)


def test_a_run_of_another_logger_has_a_rate_all_the_same(tmp_path):
    write_finished_run(tmp_path / "a", cartpole_run(), [PHYSICS_LIMITS], rates=())
    run = read_run(tmp_path / "a")
    assert run.rate == pytest.approx(6400.0)
    assert "its logger left no curves" in run_text(run)


# several runs


def test_runs_side_by_side(run_of, report):
    run_of(PHYSICS_LIMITS, name="one")
    run_of(UPDATE_LIMITS, UPDATE_LIMITS, name="two", rates=(1.0, 1.0, 6000.0, 6000.0))
    rows = compare([read_run(Path(name)) for name in ("one", "two")])
    assert [row["ratio"] for row in rows] == [1.0, 1.5]
    assert [row["efficiency"] for row in rows] == [1.0, 0.75]
    assert [row["updates_per_sec"] for row in rows] == [4000 / 64, 6000 / 64]
    status, out, _ = report("one", "two")
    assert status == 0
    (line,) = [line for line in out.splitlines() if line.startswith("two ")]
    assert line.split() == ["two", "2", "4", "6,000", "94", "1.50", "0.75", "40", "1.5", "s", "update"]
    assert "more ranks only divided them" not in out


def test_ranks_that_divide_the_same_cores_are_told(run_of, report):
    run_of(PHYSICS_LIMITS, name="one", topology={"cpus": [[0, 1]]})
    run_of(UPDATE_LIMITS, UPDATE_LIMITS, name="two", topology={"cpus": [[0], [1]]})
    assert "All had the same 2 cores: more ranks only divided them." in report("one", "two")[1]


def test_settings_that_differ_are_listed_and_no_others(tmp_path):
    for name, tree in {
        "a": {},
        "b": {"seed": 7, "learner": {"class_path": "FastSAC", "init_args": {"tau": 0.5}}},
    }.items():
        write_finished_run(tmp_path / name, cartpole_run(**tree), [PHYSICS_LIMITS])
    a, b = (read_run(tmp_path / name) for name in "ab")
    found = differences([a, b])
    assert list(found) == ["seed", "learner.tau"]
    assert (found["seed"], found["learner.tau"][1]) == ([1, 7], 0.5)
    assert differences([a, a]) == {}


# the command


def test_the_json_file_holds_the_figures_of_the_text(run_of, report, tmp_path):
    run_of(PHYSICS_LIMITS)
    status, out, err = report("--json", "figures.json", "a_run")
    assert (status, err) == (0, [])
    figures = json.loads((tmp_path / "figures.json").read_text())
    (run,) = figures["runs"]
    assert run["limit"]["name"] == "physics"
    assert run["limit"]["text"] in out
    assert run["env_steps_per_sec"] == 4000.0
    assert run["ticks"][0]["update"] == pytest.approx(4e-3)
    assert run["estimates"][0]["env_steps_per_sec"] == pytest.approx(4000 * 10 / 5.5)
    assert run["estimates"][1]["updates_per_sec"] == pytest.approx(4000 / 64 * 10 / 19.5)


def test_last_is_the_newest_run(report, tmp_path):
    for i, name in enumerate(["new", "old"]):
        write_finished_run(tmp_path / "runs" / name, cartpole_run(), [PHYSICS_LIMITS])
        os.utime(tmp_path / "runs" / name / "config.yaml", (1e9 - i, 1e9 - i))
    assert report("last")[1].startswith("new: completed")


def test_a_killed_run_is_read_from_its_reports(report, tmp_path):
    (tmp_path / "killed").mkdir()
    save_run_config(cartpole_run(), tmp_path / "killed" / "config.yaml")
    write_reports(tmp_path / "killed", 64, PHYSICS_LIMITS, (6400.0, 6400.0))
    status, out, _ = report("killed")
    assert status == 0
    assert out.startswith("killed: no summary (no run_summary.json: it was killed, or still runs; the times are from")
    assert "limit: Physics limits: 9.0 ms of a tick of 10 ms" in out


def test_a_failed_run_without_reports_is_refused_with_its_reason(report, tmp_path):
    (tmp_path / "failed").mkdir()
    save_run_config(cartpole_run(), tmp_path / "failed" / "config.yaml")
    (tmp_path / "failed" / "failure.json").write_text(json.dumps({"reason": "rank 1 ran out of memory"}))
    assert report("failed")[::2] == (
        2,
        [
            "error: run is failed; no run_summary.json: it failed: rank 1 ran out of memory, "
            "and no reports to look at instead"
        ],
    )


def test_every_folder_that_is_no_run_is_told_in_one_line(report, tmp_path):
    (tmp_path / "empty").mkdir()
    status, out, err = report("nowhere", "empty", "last")
    assert (status, out) == (2, "")
    assert err == [
        "error: run is nowhere; there is no such folder; allowed: last, or the folder of a run",
        "error: run is empty; this folder is no run's, it has no config.yaml; allowed: last, or a run's folder",
        "error: run is last; there is no run under runs",
    ]


def damaged(folder, change):
    write_finished_run(folder, cartpole_run(), [PHYSICS_LIMITS])
    file = folder / "run_summary.json"
    summary = json.loads(file.read_text())
    file.write_text(change(summary))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda summary: "{", "its run_summary.json cannot be read: Expecting property name"),
        (lambda summary: "[]", "its run_summary.json holds no mapping"),
        (
            lambda summary: json.dumps({**summary, "ranks": []}),
            "its run_summary.json, of 0.1.0, has no ranks; allowed: a run of 0.1.0",
        ),
        (lambda summary: json.dumps({"status": "completed"}), "of an unknown version, has no env_steps;"),
        (
            lambda summary: json.dumps({**summary, "ranks": [{"rank": 0}]}),
            "its run_summary.json, of 0.1.0, has no ranks.env_steps;",
        ),
        (
            lambda summary: json.dumps({**summary, "ranks": [{**summary["ranks"][0], "env_steps": 0}]}),
            "it completed before its first report: there are no times",
        ),
    ],
)
def test_a_summary_of_another_kind_is_told_in_one_line(report, tmp_path, change, text):
    damaged(tmp_path / "a", change)
    status, out, (line,) = report("a")
    assert (status, out) == (2, "")
    assert line.startswith("error: run is a; ")
    assert text in line


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (["--png", "a.png"], "error: run is missing; allowed: folders of runs, or last: report RUN..."),
        (["a", "--json", "no/where.json"], "error: json is no/where.json; its folder does not exist"),
        (["a", "--png"], "error: png is without a value; allowed: --png VALUE"),
    ],
)
def test_bad_arguments_are_told_in_one_line(report, tokens, line):
    assert report(*tokens)[::2] == (2, [line])


def test_an_unknown_option_is_refused(report):
    status, _, (line,) = report("a", "--pngs", "a.png")
    assert status == 2
    assert "pngs" in line
    assert "png" in line.partition(";")[2]


def test_without_arguments_it_says_what_it_takes(report):
    status, out, _ = report()
    assert status == 0
    assert "report RUN..." in out


# the picture


def test_a_picture_of_two_runs(run_of, report, tmp_path):
    run_of(PHYSICS_LIMITS, name="one")
    run_of(UPDATE_LIMITS, {**UPDATE_LIMITS, "all_reduce": 1.0}, name="two")
    status, out, err = report("one", "--png", "both.png", "two")
    assert (status, err) == (0, [])
    from matplotlib.image import imread

    height, width, _ = imread(tmp_path / "both.png").shape
    assert width == 1320
    assert height > 600
    assert out.endswith("both.png: written\n")


def test_the_bars_of_a_tick_add_up_to_it(run_of):
    from matplotlib.figure import Figure

    from unilab_fabric.reporting.picture import _draw_ticks

    run = run_of(PHYSICS_LIMITS)
    axis = Figure().subplots()
    _draw_ticks(axis, [(run, run.ranks[0])], several=False)
    ends = [bar.get_x() + bar.get_width() for bar in axis.patches]
    assert math.isclose(max(ends), 10.0)
    assert sum(bar.get_width() for bar in axis.patches) == pytest.approx(20.0)  # collector and learner
    names = [text.get_text() for text in axis.get_legend().get_texts()]
    assert names == ["physics", "waiting", "commit", "act", "update", "other"]


def test_without_matplotlib_it_says_what_to_install(run_of, report, monkeypatch, tmp_path):
    run_of(PHYSICS_LIMITS)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    status, out, err = report("a_run", "--png", "a.png")
    assert (status, out) == (2, "")
    assert err == ["error: png is not possible here; it needs matplotlib: pip install 'unilab-fabric[report]'"]
    assert report("a_run")[0] == 0


def test_a_picture_of_an_unknown_format_is_told_in_one_line(run_of, report):
    run_of(PHYSICS_LIMITS)
    status, _, (line,) = report("a_run", "--png", "a.xyz")
    assert status == 2
    assert line.startswith("error: png is a.xyz; it cannot be written: Format 'xyz' is not supported")
