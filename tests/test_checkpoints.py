import json
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from unilab_fabric.checkpoints import (
    CheckpointWriter,
    check_layouts,
    find_checkpoint,
    prune,
    read_manifest,
    read_state,
    restore,
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
    return writer.close(manifest(tick), {"replicated.pt": writer.write("replicated.pt", state)})


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
    assert len(whole_checkpoints(tmp_path)) == 1


def test_last_is_the_newest_of_the_newest_run(tmp_path):
    write(tmp_path / "old", 900)
    write(tmp_path / "new", 5)
    newest = write(tmp_path / "new", 40)
    assert find_checkpoint("last", log_root=tmp_path, run_name=None) == newest
    assert find_checkpoint("last", log_root=tmp_path, run_name="old").name == "tick-000000900"
    assert find_checkpoint(str(tmp_path / "new"), log_root=tmp_path, run_name=None) == newest
    assert find_checkpoint(str(newest), log_root=tmp_path, run_name=None) == newest


def test_no_checkpoint_is_an_error_that_says_where_was_looked(tmp_path):
    with pytest.raises(UserError, match="ckpt_path is last; there is no checkpoint under"):
        find_checkpoint("last", log_root=tmp_path, run_name=None)


def test_pruning_keeps_what_it_is_told_and_sweeps_up_after_a_kill(tmp_path):
    kept = [write(tmp_path, 2), write(tmp_path, 4)]
    write(tmp_path, 3)
    CheckpointWriter(tmp_path, 5).open()  # a writer that was killed
    prune(tmp_path, set(kept))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["tick-000000002", "tick-000000004"]


@pytest.mark.parametrize("keep", [0, 10, 100])
def test_a_truncated_part_is_refused_by_name(tmp_path, keep):
    path = write(tmp_path, 1)
    part = path / "replicated.pt"
    part.write_bytes(part.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"replicated\.pt is missing or not .*; its run has no other whole one"):
        read_manifest(path)
    with pytest.raises(UserError, match="it cannot be read"):
        read_state(path, "replicated.pt")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda fields: "{", r"its manifest\.json cannot be read"),
        (lambda fields: "[1, 2]", r"the format in its manifest\.json is None; this version reads 2"),
        (lambda fields: json.dumps({**fields, "format": 1}), r"the format in its manifest\.json is 1"),
        (lambda fields: json.dumps({**fields, "tick": "7"}), r'tick in its manifest\.json is "7"'),
        (lambda fields: json.dumps({**fields, "config": None}), r"config in its manifest\.json is null"),
        (lambda fields: json.dumps({k: v for k, v in fields.items() if k != "world_size"}), "world_size in its"),
        (lambda fields: json.dumps({**fields, "files": {"replicated.pt": 5}}), r"files/replicated\.pt in its .* is 5"),
    ],
)
def test_a_damaged_manifest_is_refused_by_its_field(tmp_path, damage, told):
    path = write(tmp_path, 1)
    file = path / "manifest.json"
    file.write_text(damage(json.loads(file.read_text())))
    with pytest.raises(UserError, match=told):
        read_manifest(path)


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


def test_a_checkpoint_cannot_run_code(tmp_path):
    path, target = write(tmp_path, 1), tmp_path / "owned"
    torch.save({"learner": Hostile(target)}, path / "replicated.pt")
    with pytest.raises(UserError, match="it cannot be read"):
        read_state(path, "replicated.pt")
    (path / "replicated.pt").write_bytes(pickle.dumps(Hostile(target), protocol=2))
    with pytest.raises(UserError, match="it cannot be read"):
        read_state(path, "replicated.pt")
    assert not target.exists()


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
