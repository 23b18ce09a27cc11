"""The scaling benchmark on run folders that nobody trained: what it reads, what it makes of it, what it refuses."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

ROOT = Path(__file__).parents[2]
TICKS = 100


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script that is run there
    module = importlib.import_module("scaling")
    monkeypatch.setattr(module, "cores_for", lambda most: [(cpu,) for cpu in range(most)])
    yield module
    del sys.modules["scaling"]


def fake_run(folder, rates, *, ranks=1, status="completed", returns=(), updates=50, left_out=(), cpus=1):
    """A run folder with these reports of `Perf/env_steps_per_sec`."""
    with SummaryWriter(str(folder)) as writer:
        for report, rate in enumerate(rates):
            writer.add_scalar("Perf/env_steps_per_sec", rate, report)
            writer.add_scalar("Perf/updates_per_sec", rate / 100, report)
        for report, value in enumerate(returns):
            writer.add_scalar("Train/mean_reward", value, report)
    figures = {
        "status": status,
        "env_steps": 1000 * ranks,
        "ticks": TICKS,
        "topology": {"cpus": [list(range(cpus)) for _ in range(ranks)]},
        "ranks": [
            {"rank": rank, "env_steps": 1000, "updates": updates, "seconds": {"wait": 0.5, "update": 2.0 + rank}}
            for rank in range(ranks)
            if rank not in left_out
        ],
    }
    (folder / "run_summary.json").write_text(json.dumps(figures))
    return folder


def read(scaling, folder, devices=1):
    ended = scaling.Ended(wall_s=10.0, peak_bytes=3_000_000)
    return scaling.read(folder, "FastSAC", devices, 0, ended, cores=1)


def test_a_rate_is_the_mean_of_the_second_half(scaling, tmp_path):
    run = read(scaling, fake_run(tmp_path, [1, 1, 1, 1, 100, 200, 300, 400], ranks=2, returns=[5, 7]), devices=2)
    assert run.env_steps_per_sec == 250
    assert run.updates_per_sec == pytest.approx(2.5)
    assert run.throughput == 200  # 2000 steps within the 10 s of the command
    assert run.final_return == 7
    assert run.peak_bytes == 3_000_000
    assert run.phase_ms == [{"wait": 5.0, "update": 20.0}, {"wait": 5.0, "update": 30.0}]


def test_no_episode_has_ended_and_so_there_is_no_return(scaling, tmp_path):
    assert read(scaling, fake_run(tmp_path, [100] * 8)).final_return is None


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rates": [100] * 7}, "Perf/env_steps_per_sec has 7 reports in the event files of {folder}; 8 are needed"),
        ({"rates": []}, "Perf/env_steps_per_sec has 0 reports"),
        ({"rates": [100] * 7 + [float("nan")]}, "Perf/env_steps_per_sec is nan in the event files of {folder}"),
        ({"status": "stopped"}, "the run is stopped, not completed, says {folder}/run_summary.json"),
        ({"left_out": [1]}, "rank 1 of 2 is missing in {folder}/run_summary.json"),
        ({"ranks": 3}, "{folder}/run_summary.json has 3 ranks, and 2 were asked for"),
        ({"updates": 0}, "rank 0 has 0 updates in {folder}/run_summary.json"),
        ({"cpus": 2}, "rank 0 had 2 CPUs, not 1, says run_summary.json in {folder}"),
    ],
)
def test_missing_data_is_an_error_that_names_rank_and_file(scaling, tmp_path, changes, text):
    fake_run(tmp_path, **{"rates": [100] * 8, "ranks": 2, **changes})
    with pytest.raises(scaling.Unmeasured) as raised:
        read(scaling, tmp_path, devices=2)
    assert text.format(folder=tmp_path) in str(raised.value)


def test_a_run_without_its_files_is_an_error(scaling, tmp_path):
    with pytest.raises(scaling.Unmeasured, match=r"run_summary\.json is missing"):
        read(scaling, tmp_path)
    fake_run(tmp_path, [100] * 8)
    (tmp_path / "run_summary.json").write_text("{")
    with pytest.raises(scaling.Unmeasured, match="is no JSON"):
        read(scaling, tmp_path)
    fake_run(tmp_path, [100] * 8)
    for file in tmp_path.glob("events*"):
        file.unlink()
    with pytest.raises(scaling.Unmeasured, match="there is no event file"):
        read(scaling, tmp_path)


@pytest.fixture
def pretend(scaling, tmp_path, monkeypatch):
    """Makes `main` find these steady rates instead of training: by devices, one rate for each repeat."""

    def run(rates, *arguments, broken=None):
        commands = []

        def fit(arguments, folder, cpus, deadline_s):
            given = dict(one.removeprefix("--").split("=", 1) for one in arguments)
            commands.append({**given, "cpus": cpus})
            devices, name = int(given["devices"]), given["training.run_name"]
            repeat = int(name.rsplit("-", 1)[1])
            if broken == (devices, repeat):
                raise scaling.Unmeasured("it ended with status 1; see output.txt")
            fake_run(Path(given["training.log_root"]) / name, [rates[devices][repeat]] * 8, ranks=devices)
            return scaling.Ended(wall_s=10.0, peak_bytes=devices * 1_000_000)

        monkeypatch.setattr(scaling, "fit", fit)
        arguments = ["--learners", "FastSAC", "--accelerator", "cpu", "--output", str(tmp_path / "out"), *arguments]
        return scaling.main(arguments), commands

    return run


def numbers(tmp_path):
    return json.loads((tmp_path / "out" / "scaling.json").read_text())


def test_the_ratio_is_the_median_of_the_ratios_within_a_repeat(pretend, tmp_path, capsys):
    status, _ = pretend({1: [100, 200, 100], 2: [180, 200, 190]})
    assert status == 0
    found = numbers(tmp_path)
    alone, both = found["results"]
    assert both["ratios"] == [1.8, 1.0, 1.9]
    assert both["ratio"] == 1.8
    assert both["efficiency"] == 0.9
    assert (alone["ratio"], alone["efficiency"]) == (1.0, 1.0)
    assert both["env_steps_per_sec"] == 190
    assert both["peak_bytes"] == 2_000_000
    assert both["phase_ms"] == [{"wait": 5.0, "update": 20.0}, {"wait": 5.0, "update": 30.0}]
    assert found["verdicts"] == {"FastSAC": {"ratio": 1.8, "threshold": 1.7, "reached": True}}
    assert len(found["runs"]) == 6
    assert {"processor", "cores_per_rank", "env_steps_per_rank"} < set(found)
    page = (tmp_path / "out" / "scaling.md").read_text()
    assert "| FastSAC | 2 | 190 | 1.9 | 200 | 1.80 | 0.90 | none | 2 MB |" in page
    assert "| FastSAC | 2 | 1 | 5.00 | 30.00 |" in page
    assert "N = 2 is 1.80 times as fast as N = 1, which reaches 1.7" in page
    assert page in capsys.readouterr().out
    assert (tmp_path / "out" / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("threshold", "status"), [(1.5, 0), (1.51, 1)])
def test_the_exit_status_tells_whether_two_devices_reach_the_threshold(pretend, capsys, threshold, status):
    assert pretend({1: [100], 2: [150]}, "--repeats", "1", "--threshold", str(threshold))[0] == status
    assert ("misses" if status else "reaches") in capsys.readouterr().out


def test_a_failed_run_ends_everything_with_its_name_and_no_figures(pretend, tmp_path, capsys):
    assert pretend({1: [100] * 3, 2: [190] * 3}, broken=(2, 1))[0] == 2
    assert "error: FastSAC, N = 2, repeat 1: it ended with status 1; see output.txt" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("scaling.*"))


def test_without_two_devices_there_is_no_verdict(pretend, tmp_path, capsys):
    assert pretend({1: [100]}, "--repeats", "1", "--devices", "1")[0] == 0
    assert "No verdict: N = 2 was not measured." in capsys.readouterr().out


def test_ranks_get_the_same_cores_and_steps_in_every_job_and_jobs_take_turns(pretend):
    _, commands = pretend({1: [100] * 2, 2: [190] * 2, 4: [300] * 2}, "--repeats", "2", "--devices", "1", "2", "4")
    assert [int(command["devices"]) for command in commands] == [1, 2, 4, 4, 2, 1]
    assert [command["cpus"] for command in commands[:3]] == [[0], [0, 1], [0, 1, 2, 3]]
    assert [int(command["training.max_env_steps"]) for command in commands[:3]] == [300_000, 600_000, 1_200_000]
    assert {command["config"] for command in commands} == {"sac.yaml"}


def test_too_few_cores_are_an_error(scaling, monkeypatch, tmp_path, capsys):
    monkeypatch.undo()
    monkeypatch.setattr(scaling, "allowed_cores", lambda needed: ())
    assert scaling.main(["--accelerator", "cpu", "--output", str(tmp_path)]) == 2
    assert "error: 2 ranks need 2 cores, and this process may use 0" in capsys.readouterr().err


def test_a_command_that_fails_is_quoted_and_one_that_lasts_is_ended(scaling, tmp_path):
    jobs = sys.modules["shared.jobs"]
    with pytest.raises(jobs.Unmeasured, match=r"it ended with status 2; see .*output\.txt, whose last line is: error"):
        jobs.fit(["--no_such_setting=1"], tmp_path, {0}, 60.0)
    with pytest.raises(jobs.Unmeasured, match="it has not ended within 0 s"):
        jobs.fit(["--config=cartpole.yaml", f"--training.log_root={tmp_path}"], tmp_path, None, 0.1)


def test_memory_is_that_of_the_process_and_what_it_started(scaling):
    jobs = sys.modules["shared.jobs"]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in jobs.tree(os.getpid())
        assert jobs.memory([os.getpid(), child.pid]) > jobs.memory([os.getpid()]) > 10_000_000
