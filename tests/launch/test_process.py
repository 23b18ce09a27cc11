"""What a rank does after its run."""

import subprocess

import pytest

from unilab_fabric.launch import process


@pytest.mark.parametrize(
    ("returncode", "out", "err", "told"),
    [
        (0, "a.mp4: 250 frames of it\n", "", "a.mp4: 250 frames of it\n"),
        (2, "", "error: MUJOCO_GL is egl; nothing\n", "warning: no film was made: error: MUJOCO_GL is egl; nothing\n"),
        (-11, "", "", "warning: no film was made: play ended with status -11\n"),
    ],
)
def test_a_film_that_fails_is_a_warning(tmp_path, monkeypatch, capsys, returncode, out, err, told):
    asked = []

    def run(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, returncode, out, err)

    monkeypatch.setattr(subprocess, "run", run)
    process._film(tmp_path)
    assert asked[0][-1] == str(tmp_path)
    assert capsys.readouterr().err == told


def test_a_film_that_takes_too_long_is_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(process, "_FILM_S", 0.01)
    process._film(tmp_path)
    assert capsys.readouterr().err == "warning: no film was made within 0 s\n"
