"""The built wheel, installed elsewhere, trains in an empty folder without a network."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# In a network namespace of its own the loopback interface is there, but off.
OFFLINE = """
import fcntl, os, socket, struct, sys
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
with socket.socket() as any_socket:
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH", b"lo", IFF_UP))
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""

# Python starts with this: whoever reaches for the network leaves a line in the file and fails.
GUARD = """
import os, socket
def guarded(method):
    def call(self, address, *rest):
        if self.family != socket.AF_UNIX and not str(address[0]).startswith(("127.", "::1", "localhost")):
            with open(os.environ["NETWORK_LOG"], "a") as log:
                log.write(f"{method.__name__} {address}\\n")
            raise OSError(f"the network is blocked: {address}")
        return method(self, address, *rest)
    return call
class Guarded(socket.socket):
    connect = guarded(socket.socket.connect)
    connect_ex = guarded(socket.socket.connect_ex)
    sendto = guarded(socket.socket.sendto)
socket.socket = Guarded
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by way of the source distribution, as a release is."""
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("not a source checkout")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The wheel in a folder of its own; what it needs comes from this environment."""
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--quiet", "--target", folder]
    run(sys.executable, "-m", "pip", "install", *options, wheel, cwd=folder)
    return folder


def run(*command, cwd, within_s=120, **environment):
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=within_s,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def python_without_network(folder):
    """Python with nothing but the loopback interface, where this system lets us; else just Python."""
    (folder / "offline.py").write_text(OFFLINE)
    offline = ["unshare", "-n", sys.executable, folder / "offline.py"]
    if shutil.which("unshare") and subprocess.run([*offline, "-c", ""], capture_output=True).returncode == 0:
        return offline
    return [sys.executable]


def test_the_wheel_holds_the_presets_the_robots_and_the_license(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for preset in (ROOT / "configs").rglob("*.yaml"):
        assert f"unilab_fabric/{preset.relative_to(ROOT).as_posix()}" in names
    for file in (ROOT / "unilab_fabric").rglob("*"):
        if file.is_file() and "__pycache__" not in file.parts:
            assert file.relative_to(ROOT).as_posix() in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.startswith("unilab_fabric") for name in names)  # nothing else is put among the user's packages


def test_it_trains_and_is_judged_in_an_empty_folder_without_a_network(installed, tmp_path):
    guard, folder = tmp_path / "guard", tmp_path / "empty"
    guard.mkdir()
    folder.mkdir()
    (guard / "sitecustomize.py").write_text(GUARD)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(guard), str(installed)]),
        "NETWORK_LOG": str(tmp_path / "network.log"),
    }
    python = python_without_network(tmp_path)

    where = run(*python, "-c", "import unilab_fabric; print(unilab_fabric.__file__)", cwd=folder, **environment)
    assert Path(where.strip()).is_relative_to(installed)

    ranks = min(2, len(os.sched_getaffinity(0)))
    fit = [*python, "-m", "unilab_fabric", "fit", "--config", "cartpole.yaml", "--training.accelerator=cpu"]
    small = [f"--devices={ranks}", "--training.max_env_steps=2560", "--training.run_name=run"]
    run(*fit, *small, cwd=folder, **environment)
    summary = json.loads((folder / "runs/run/run_summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["env_steps"] == 2560
    assert len(summary["ranks"]) == ranks

    script = [*python, installed / "bin" / "unilab-fabric"]
    judged = ["evaluate", "--ckpt_path=last", "--episodes=2", "--episode_s=0.5", "--json=judged.json"]
    run(*script, *judged, cwd=folder, **environment)
    assert json.loads((folder / "judged.json").read_text())["episodes"] == 2

    assert not (tmp_path / "network.log").exists()
    assert sorted(path.name for path in folder.iterdir()) == ["judged.json", "runs"]


def test_the_guard_against_the_network_works(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(GUARD)
    program = (
        "import socket\n"
        "try:\n"
        "    socket.create_connection(('192.0.2.1', 9), 1)\n"
        "except OSError as error:\n"
        "    print(error)\n"
    )
    environment = {"PYTHONPATH": str(tmp_path), "NETWORK_LOG": str(tmp_path / "log")}
    assert "the network is blocked" in run(sys.executable, "-c", program, cwd=tmp_path, **environment)
    assert "192.0.2.1" in (tmp_path / "log").read_text()
