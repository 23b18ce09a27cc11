"""All benchmarks in turn: what is skipped, late or failed, and what that means for the whole."""

import json

import pytest


@pytest.fixture
def everything(script, monkeypatch, tmp_path):
    """The program over scripts of a test's own: by name, the source and the seconds it may take."""
    module = script("everything")

    def build(sources):
        for name, (source, _) in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        monkeypatch.setattr(module, "HERE", tmp_path)
        monkeypatch.setattr(module, "ALL", [module.Benchmark(f"{n}.py", (), s) for n, (_, s) in sources.items()])
        return module

    return build


WRITES = "import sys; open(sys.argv[1].partition('=')[2], 'w').write('{}'); print('hello')"


def run(module, tmp_path, *arguments):
    status = module.main([f"--output={tmp_path / 'out'}", *arguments])
    return status, json.loads((tmp_path / "out" / "everything.json").read_text())


def test_each_leaves_its_figures_and_what_it_printed(everything, tmp_path, capsys):
    status, told = run(everything({"a": (WRITES, 30.0)}), tmp_path)
    assert status == 0
    assert (tmp_path / "out" / "a.json").read_text() == "{}"
    assert (tmp_path / "out" / "a.txt").read_text() == "hello\n"
    assert [(one["name"], one["status"]) for one in told] == [("a", 0)]
    assert "a: done" in capsys.readouterr().out


def test_a_missed_bar_is_status_1_and_a_failure_2_and_the_others_run(everything, tmp_path, capsys):
    missed, failed = (WRITES + "; sys.exit(1)", 30.0), ("raise SystemExit(7)", 30.0)
    module = everything({"missed": missed, "a": (WRITES, 30.0)})
    assert run(module, tmp_path)[0] == 1
    module = everything({"failed": failed, "missed": missed, "a": (WRITES, 30.0)})
    status, told = run(module, tmp_path)
    assert (status, [one["status"] for one in told]) == (2, [7, 1, 0])
    out = capsys.readouterr().out
    assert "failed: failed (7)" in out
    assert "missed: missed its bar" in out


def test_one_that_is_late_is_ended_and_can_clean_up(everything, tmp_path):
    source = f"""
import pathlib, time
try:
    time.sleep(60)
finally:
    pathlib.Path({str(tmp_path / "cleaned")!r}).touch()
"""
    status, told = run(everything({"late": (source, 1.5)}), tmp_path)
    assert (status, told[0]["status"]) == (2, None)
    assert (tmp_path / "cleaned").exists()


def test_a_traceback_is_a_failure_and_no_missed_bar(everything, tmp_path):
    assert run(everything({"broken": ("raise ValueError", 30.0)}), tmp_path)[0] == 2


def test_without_a_cuda_device_its_benchmarks_are_skipped_and_say_so(everything, monkeypatch, tmp_path, capsys):
    module = everything({})
    monkeypatch.setattr(module, "ALL", [module.Benchmark("cuda.py", (), 1.0, needs_cuda=True)])
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: False)
    status, told = run(module, tmp_path)
    assert (status, told[0]["skipped"]) == (0, "there is no CUDA device")
    assert "cuda: skipped, there is no CUDA device" in capsys.readouterr().out


def test_every_benchmark_of_the_folder_is_among_them(script):
    module = script("everything")
    theirs = {one.script for one in module.ALL}
    there = {path.name for path in module.HERE.glob("*.py")} - {"everything.py", "scaling_model.py"}
    assert theirs == there
    assert sum(one.deadline_s for one in module.ALL if not one.needs_cuda) < 3600
