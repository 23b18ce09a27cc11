import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.manifests import cartpole_run, write_checkpoint
from unilab_fabric import cli
from unilab_fabric.checkpoints import (
    CheckpointFailed,
    CheckpointWriter,
    check_layouts,
    find_checkpoint,
    prune,
    read_manifest,
    read_state,
    restore,
    saved_config,
    sweep,
    verify,
    whole_checkpoints,
)
from unilab_fabric.errors import UserError


def manifest(tick):
    counters = {"tick": tick, "env_steps": 8 * tick, "updates": tick, "world_size": 1, "num_envs": 8, "seed": 3}
    return {**counters, "replay_ticks": 0, "train_s": 1.0, "score": None, "config": {}}


def write(run, tick):
    writer = CheckpointWriter(run, tick)
    writer.open()
    state = {"learner": {"actor": torch.arange(4.0)}, "note": ["a", 1, 2.5, None, True]}
    names = ("replicated.pt", "rank-0.pt")
    return writer.close(manifest(tick), {name: writer.write(name, state) for name in names})


def test_what_was_written_is_read_back(tmp_path):
    path = write(tmp_path, 7)
    assert path == tmp_path / "checkpoints" / "tick-000000007"
    assert read_manifest(path)["tick"] == 7
    state = read_state(path, "replicated.pt")
    assert torch.equal(state["learner"]["actor"], torch.arange(4.0))
    assert state["note"] == ["a", 1, 2.5, None, True]


def test_an_unfinished_checkpoint_is_none(tmp_path):
    write(tmp_path, 1)
    unfinished = CheckpointWriter(tmp_path, 2)
    unfinished.open()
    unfinished.write("replicated.pt", {"a": 1})
    (unfinished.folder / "manifest.json").write_text("{}")  # even with a manifest: it has not been renamed
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["tick-000000001"]


def test_the_same_tick_can_be_written_again(tmp_path):
    write(tmp_path, 1)
    write(tmp_path, 1)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["tick-000000001"]


class Killed(BaseException):
    """What a test raises where a process would be killed."""


@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_kill_while_a_checkpoint_is_replaced_leaves_none_half(tmp_path, monkeypatch, done):
    """After so many steps, each a name given or a folder removed; the kill finds a folder half removed."""
    older, _ = write(tmp_path, 1), write(tmp_path, 2)
    writer = CheckpointWriter(tmp_path, 2)
    writer.open()
    files = {name: writer.write(name, {}) for name in ("replicated.pt", "rank-0.pt")}
    steps, rename = iter(range(done)), Path.rename

    def rename_or_die(path, target):
        if next(steps, None) is None:
            raise Killed
        return rename(path, target)

    def die_while_removing(folder, **options):
        (folder / "replicated.pt").unlink()
        raise Killed

    monkeypatch.setattr(Path, "rename", rename_or_die)
    monkeypatch.setattr(shutil, "rmtree", die_while_removing)
    with pytest.raises(Killed):
        writer.close(manifest(2), files)
    assert older in whole_checkpoints(tmp_path)
    for path in whole_checkpoints(tmp_path):
        verify(path)


def test_last_is_the_newest_of_the_newest_run(tmp_path):
    write(tmp_path / "old", 900)
    write(tmp_path / "new", 5)
    newest = write(tmp_path / "new", 40)
    assert find_checkpoint("last", log_root=tmp_path, run_name=None) == newest
    assert find_checkpoint("last", log_root=tmp_path, run_name="old").name == "tick-000000900"
    assert find_checkpoint(str(tmp_path / "new"), log_root=tmp_path, run_name=None) == newest
    assert find_checkpoint(str(newest), log_root=tmp_path, run_name=None) == newest


@pytest.mark.parametrize("left", [[], ["replicated.pt"]])
def test_the_newest_is_never_passed_over_in_silence(tmp_path, left):
    """Its name says that it was written to the end, so one without a manifest is damaged, not absent."""
    whole, newest = write(tmp_path / "run", 1), write(tmp_path / "run", 2)
    for file in newest.iterdir():
        if file.name not in left:
            file.unlink()
    for name in ("last", str(tmp_path / "run"), str(newest)):
        found = find_checkpoint(name, log_root=tmp_path, run_name=None)
        assert found == newest
    with pytest.raises(UserError) as caught:
        read_manifest(newest)
    told = f"its manifest.json cannot be read: No such file or directory; the newest whole one is {whole}"
    assert str(caught.value) == f"ckpt_path is {newest}; {told}"


def test_a_checkpoint_that_was_never_finished_is_refused(tmp_path):
    whole, unfinished = write(tmp_path, 1), CheckpointWriter(tmp_path, 2)
    unfinished.open()
    (unfinished.folder / "manifest.json").write_text((whole / "manifest.json").read_text())
    with pytest.raises(UserError, match=f"it was never finished; the newest whole one is {whole}"):
        find_checkpoint(str(unfinished.folder), log_root=tmp_path, run_name=None)


def test_no_checkpoint_is_an_error_that_says_where_was_looked(tmp_path):
    with pytest.raises(UserError, match="ckpt_path is last; there is no checkpoint under"):
        find_checkpoint("last", log_root=tmp_path, run_name=None)


def test_pruning_keeps_what_it_is_told_and_sweeps_up_after_a_kill(tmp_path):
    kept = [write(tmp_path, 2), write(tmp_path, 4)]
    write(tmp_path, 3)
    CheckpointWriter(tmp_path, 5).open()  # a writer that was killed
    prune(tmp_path, set(kept))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["tick-000000002", "tick-000000004"]


def test_what_a_user_keeps_beside_the_checkpoints_is_left_alone(tmp_path):
    newest = write(tmp_path, 3)
    folder = newest.parent
    shutil.copytree(newest, folder / "tick-000000003-good")
    (folder / "notes.txt").write_text("tick 3 walks well")
    (folder / "tick-000000009").write_text("a file")
    prune(tmp_path, {newest})
    assert sorted(path.name for path in folder.iterdir()) == [
        "notes.txt",
        "tick-000000003",
        "tick-000000003-good",
        "tick-000000009",
    ]
    assert whole_checkpoints(tmp_path) == [newest]
    assert find_checkpoint(str(folder / "tick-000000003-good"), log_root=tmp_path, run_name=None)  # by its own name


@pytest.mark.parametrize("keep", [0, 10, 100])
def test_a_truncated_part_is_refused_by_name(tmp_path, keep):
    path = write(tmp_path, 1)
    part = path / "replicated.pt"
    part.write_bytes(part.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"replicated\.pt is missing or not .*; its run has no other whole one"):
        read_manifest(path)
    with pytest.raises(UserError, match="it cannot be read"):
        read_state(path, "replicated.pt")


def listing(fields, name, entry):
    """The manifest with another entry for a file."""
    return json.dumps({**fields, "files": {**fields["files"], name: entry}})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda fields: "{", r"its manifest\.json cannot be read"),
        (lambda fields: "[1, 2]", r"format in its manifest\.json is missing; this version reads 2"),
        (
            lambda fields: json.dumps({**fields, "format": 1}),
            r"format in its manifest\.json is 1; this version reads 2",
        ),
        (lambda fields: json.dumps({**fields, "tick": "7"}), r'tick in its manifest\.json is "7"'),
        (lambda fields: json.dumps({**fields, "config": None}), r"config in its manifest\.json is missing"),
        (lambda fields: json.dumps({k: v for k, v in fields.items() if k != "world_size"}), "world_size in .* missing"),
        (lambda fields: json.dumps({**fields, "world_size": 0}), r"world_size in its manifest\.json is 0"),
        (lambda fields: json.dumps({**fields, "world_size": 10**9}), r"files/rank-1\.pt in its .* is missing"),
        (lambda fields: json.dumps({**fields, "tick": True}), r"tick in its manifest\.json is true"),
        (lambda fields: json.dumps({**fields, "tick": -1}), r"tick in its manifest\.json is -1"),
        (lambda fields: json.dumps({**fields, "train_s": None}), r"train_s in its manifest\.json is missing"),
        (lambda fields: json.dumps({**fields, "files": []}), r"files in its manifest\.json is \[\]"),
        (lambda fields: json.dumps({**fields, "files": {}}), r"files/replicated\.pt in its .* is missing"),
        (lambda fields: listing(fields, "replicated.pt", 5), r"files/replicated\.pt in its .* is 5"),
        (lambda fields: listing(fields, "rank-0.pt", [None, 5]), r"files/rank-0\.pt in its .* is \[null, 5\]"),
        (lambda fields: listing(fields, "../../secret", [1, 5]), r"files/\.\./\.\./secret in its .* is \[1, 5\]"),
        (lambda fields: "[" * 100_000, r"its manifest\.json cannot be read: maximum recursion depth"),
        (lambda fields: "\0\udcff", r"its manifest\.json cannot be read"),
    ],
)
def test_a_damaged_manifest_is_refused_by_its_field(tmp_path, damage, told):
    path = write(tmp_path, 1)
    file = path / "manifest.json"
    file.write_text(damage(json.loads(file.read_text())), errors="surrogateescape")
    with pytest.raises(UserError, match=told) as caught:
        read_manifest(path)
    assert "\n" not in str(caught.value)


CONFIG = {
    "training": {},
    **{section: {"class_path": "Mine", "init_args": {}} for section in ("task", "learner", "logger")},
}


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"training": 3}, "config/training in its manifest.json is 3"),
        ({"task": None}, "config/task in its manifest.json is missing"),
        ({"learner": {"init_args": {}}}, "config/learner/class_path in its manifest.json is missing"),
        ({"logger": {"class_path": "Mine", "init_args": []}}, "config/logger/init_args in its manifest.json is []"),
    ],
)
def test_a_configuration_that_is_none_is_refused_by_its_field(tmp_path, changed, told):
    path = write(tmp_path, 1)
    file = path / "manifest.json"
    fields = json.loads(file.read_text())
    file.write_text(json.dumps({**fields, "config": CONFIG}))
    assert saved_config(path) == CONFIG
    file.write_text(json.dumps({**fields, "config": {**CONFIG, **changed}}))
    with pytest.raises(UserError) as caught:
        saved_config(path)
    assert str(caught.value) == f"ckpt_path is {path}; {told}; its run has no other whole one"


def flip_a_bit(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_one_changed_bit_is_found_and_the_newest_whole_checkpoint_is_offered(tmp_path):
    write(tmp_path, 1)
    whole, damaged, newest = write(tmp_path, 2), write(tmp_path, 3), write(tmp_path, 4)
    for path in (damaged, newest):
        verify(path)
        flip_a_bit(path / "replicated.pt")
    assert read_manifest(newest)["tick"] == 4  # sizes agree
    with pytest.raises(
        UserError, match=r"replicated\.pt is damaged: its CRC-32 .*; the newest whole one is "
    ) as caught:
        verify(newest)
    assert str(caught.value).endswith(str(whole))
    assert "\n" not in str(caught.value)


def test_a_whole_checkpoint_newer_than_the_damaged_one_is_offered_too(tmp_path):
    damaged, newest = write(tmp_path, 3), write(tmp_path, 4)
    (damaged / "replicated.pt").unlink()
    with pytest.raises(UserError, match=f"the newest whole one is {newest}"):
        read_manifest(damaged)


@pytest.mark.parametrize("command", ["fit", "evaluate", "doctor"])
@pytest.mark.parametrize("ckpt_path", ["last", "runs/a", "runs/a/checkpoints/tick-000000030"])
def test_no_command_goes_on_from_a_damaged_checkpoint(tmp_path, monkeypatch, capsys, command, ckpt_path):
    monkeypatch.chdir(tmp_path)
    learner = {"class_path": "FastSAC", "init_args": {"batch_size": 64}}
    newest = write_checkpoint(Path("runs/a"), cartpole_run(learner=learner))
    shutil.copytree(newest, newest.with_name("tick-000000020"))
    flip_a_bit(newest / "rank-0.pt")
    monkeypatch.setattr("unilab_fabric.launch.job.run_job", lambda config, plan: 0)  # should it come to that
    assert cli.main([command, f"--ckpt_path={ckpt_path}"]) == 2
    assert capsys.readouterr().err == (
        "error: ckpt_path is runs/a/checkpoints/tick-000000030; rank-0.pt is damaged: its CRC-32 is not the one in "
        "manifest.json; the newest whole one is runs/a/checkpoints/tick-000000020\n"
    )


LIMITED = """
import resource, signal, sys
from pathlib import Path
import torch
from unilab_fabric.checkpoints import CheckpointFailed, CheckpointWriter
writer = CheckpointWriter(Path(sys.argv[1]), 5)
writer.open()
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    writer.write("rank-0.pt", {"replay": torch.zeros(100_000)})
except CheckpointFailed as error:
    print(error)
print(sorted(path.name for path in writer.folder.iterdir()))
"""


def test_a_disk_that_takes_no_more_is_named_and_half_a_file_is_removed(tmp_path):
    command = [sys.executable, "-c", LIMITED, str(tmp_path)]
    told, left = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    assert "rank-0.pt could not be written: File too large; " in told
    assert told.endswith("MB are free")
    assert left == "[]"


def told_by_a_full_disk(path, action):
    path.symlink_to("/dev/full")
    with pytest.raises(CheckpointFailed) as caught:
        action()
    assert not path.is_symlink()  # nothing of it is left
    return str(caught.value)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named_for_each_file_with_the_space_that_is_left(tmp_path):
    writer = CheckpointWriter(tmp_path, 5)
    writer.open()
    part, last = writer.folder / "rank-0.pt", writer.folder / "manifest.json"
    told = told_by_a_full_disk(part, lambda: writer.write("rank-0.pt", {"replay": torch.zeros(10_000)}))
    assert told.startswith(f"{part} could not be written: No space left on device; ")
    assert told.endswith(" MB are free")
    told = told_by_a_full_disk(last, lambda: writer.close(manifest(5), {}))
    assert told.startswith(f"{last} could not be written: No space left on device; ")
    assert whole_checkpoints(tmp_path) == []


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("in the way")
    with pytest.raises(CheckpointFailed, match=r"tick-000000005\.partial could not be written: .*; .* MB are free"):
        CheckpointWriter(tmp_path, 5).open()


def test_what_a_killed_writer_left_is_swept(tmp_path):
    kept = write(tmp_path, 1)
    CheckpointWriter(tmp_path, 2).open()
    sweep(tmp_path)
    assert list((tmp_path / "checkpoints").iterdir()) == [kept]
    sweep(tmp_path / "no such run")


def test_another_layout_of_the_same_size_is_refused_by_the_parameter(tmp_path):
    own = {"actor": [["layers.0.weight", [2, 3], 0], ["layers.0.bias", [3], 64]]}
    check_layouts(own, {"actor": list(own["actor"])}, tmp_path)
    swapped = {"actor": [["layers.0.weight", [3, 2], 0], ["layers.0.bias", [3], 64]]}
    with pytest.raises(UserError, match=r"in actor there is layers\.0\.weight \(3, 2\) at 0 where this learner has"):
        check_layouts(own, swapped, tmp_path)
    with pytest.raises(UserError, match=r"in actor there is nothing where this learner has layers\.0\.bias"):
        check_layouts(own, {"actor": own["actor"][:1]}, tmp_path)


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, target):
        self._target = target

    def __reduce__(self):
        return (open, (str(self._target), "w"))


@pytest.mark.parametrize("name", ["replicated.pt", "rank-0.pt"])
def test_a_checkpoint_cannot_run_code(tmp_path, name):
    path, target = write(tmp_path, 1), tmp_path / "owned"
    torch.save({"learner": Hostile(target)}, path / name)
    with pytest.raises(UserError, match="it cannot be read"):
        read_state(path, name)
    (path / name).write_bytes(pickle.dumps(Hostile(target), protocol=2))
    with pytest.raises(UserError, match="it cannot be read"):
        read_state(path, name)
    assert not target.exists()


def test_a_part_that_lacks_a_field_is_refused_by_its_name(tmp_path):
    path = write(tmp_path, 1)
    assert read_state(path, "rank-0.pt", ("learner", "note"))
    with pytest.raises(UserError, match=r"rank-0\.pt; it holds no slot, replay"):
        read_state(path, "rank-0.pt", ("learner", "slot", "replay"))
    torch.save([1], path / "rank-0.pt")
    with pytest.raises(UserError, match=r"rank-0\.pt; it holds no fields"):
        read_state(path, "rank-0.pt", ("learner",))


def test_environments_cannot_bring_code_along_either(tmp_path):
    target = tmp_path / "owned"
    np.savez(tmp_path / "envs.npz", state=np.array([Hostile(target)], dtype=object))
    with np.load(tmp_path / "envs.npz", allow_pickle=False) as state, pytest.raises(ValueError, match="allow_pickle"):
        dict(state)
    assert not target.exists()


def test_what_could_not_be_read_back_is_refused_when_it_is_saved(tmp_path):
    writer = CheckpointWriter(tmp_path, 1)
    writer.open()
    with pytest.raises(TypeError, match=r"hooks\.pt/mine\[1\] is a set"):
        writer.write("hooks.pt", {"mine": [1, {2}]})


def test_tensors_are_restored_in_place_or_not_at_all(tmp_path):
    live = {"actor": torch.zeros(4)}
    address = live["actor"].data_ptr()
    restore(live, {"actor": torch.arange(4.0)}, tmp_path)
    assert live["actor"].tolist() == [0, 1, 2, 3]
    assert live["actor"].data_ptr() == address
    with pytest.raises(UserError, match="critic stands on one side only"):
        restore(live, {"actor": torch.zeros(4), "critic": torch.zeros(1)}, tmp_path)
    with pytest.raises(UserError, match=r"actor is torch\.float32 \(5,\) there and torch\.float32 \(4,\) here"):
        restore(live, {"actor": torch.zeros(5)}, tmp_path)
