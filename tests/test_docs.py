"""What the documents show is run: every command, and the output where the page gives one."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from tests.manifests import cartpole_run, write_checkpoint, write_finished_run
from unilab_fabric import cli

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("README*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PROGRAMS = ("python -m unilab_fabric", "unilab-fabric")


def commands(page):
    """Command lines that stand alone on an indented line, comments taken off."""
    for line in page.read_text().splitlines():
        text = line.strip().rpartition("&& ")[2]
        for program in PROGRAMS:
            if line.startswith("    ") and text.startswith(f"{program} ") and "COMMAND" not in text:
                arguments = text.removeprefix(program).replace("<name>", "my_run")
                yield shlex.split(arguments, comments=True)


def examples(page):
    """Lines after `$` with the output below them."""
    for block in re.findall(r"```text\n(.*?)```", page.read_text(), flags=re.DOTALL):
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$).+\n)*)", block, flags=re.MULTILINE):
            variables, _, arguments = command.partition("python -m unilab_fabric ")
            yield dict(word.split("=") for word in variables.split()), shlex.split(arguments), output.splitlines()


MY_TASK = """
from unilab_fabric.envs.tasks.cartpole import CartpoleSwingup
class MyTask(CartpoleSwingup):
    def __init__(self, num_envs: int = 64, *, my_setting: int = 1, num_threads: int = 0, seed: int = 0):
        super().__init__(num_envs, num_threads=num_threads, seed=seed)
"""
TICK_MS = {"tick": 10, "wait": 5, "commit": 0.2, "act": 0.3, "update": 4, "physics": 9, "collector_wait": 1}
SHOWN = [(page, tokens) for page in PAGES for tokens in commands(page)]
EXAMPLES = [example for page in PAGES for example in examples(page)]


@pytest.fixture(autouse=True)
def a_folder_with_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "runs" / "my_run", cartpole_run())
    for name, ranks in {"one-rank": 1, "two-ranks": 2}.items():
        write_finished_run(tmp_path / "runs" / name, cartpole_run(), [TICK_MS] * ranks)
    (tmp_path / "my_package.py").write_text(MY_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "docs"))


@pytest.mark.parametrize(("page", "tokens"), SHOWN, ids=[f"{page.name}: {' '.join(tokens)}" for page, tokens in SHOWN])
def test_a_command_of_the_documents_is_understood(page, tokens, monkeypatch, capsys):
    monkeypatch.setattr("unilab_fabric.evaluation.evaluate", lambda path, **options: {"checkpoint": str(path)})
    monkeypatch.setattr("unilab_fabric.evaluation.format_table", lambda result: "table")
    if tokens[0] == "fit":
        tokens = [*tokens, "--print_config"]  # training itself is tested elsewhere
    if tokens[0] == "doctor":
        tokens = [*tokens, "--devices=1"]  # this machine may have a single core
    files = {"learner": "FastSAC", "robot": "a robot", "control": {"rate_hz": 50}}
    monkeypatch.setattr("unilab_fabric.exporting.export", lambda path, folder: files)
    monkeypatch.setattr("unilab_fabric.play.playing.Playing", lambda path, **options: SimpleNamespace(title="it"))
    monkeypatch.setattr("unilab_fabric.play.film.record", lambda playing, output, **options: 1)
    monkeypatch.setattr("unilab_fabric.play.window.show", lambda playing, seconds: None)
    monkeypatch.setattr("unilab_fabric.play.web.WebView", lambda playing, **options: MagicMock())
    if tokens[0] == "motion":  # it is understood, but the file is not here
        assert cli.main(tokens) == 2
        assert "input is dance." in capsys.readouterr().err
        return
    if tokens[0] == "rsl_rl":  # it is understood, but the run here is not PPO's
        assert cli.main(tokens) == 2
        assert "its learner is FastSAC; allowed: a run of PPO" in capsys.readouterr().err
        return
    assert cli.main(tokens) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "tokens", "output"), EXAMPLES, ids=[" ".join(tokens) for _, tokens, _ in EXAMPLES]
)
def test_an_example_gives_the_output_shown(variables, tokens, output, tmp_path, monkeypatch, capsys):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr("unilab_fabric.launch.devices.cuda_device_count", lambda: 0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(tokens) == 2
    assert capsys.readouterr().err.splitlines() == output


def test_the_pages_have_commands_and_examples():
    assert len(SHOWN) > 10
    assert len(EXAMPLES) > 10
