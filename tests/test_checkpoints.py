import json
import pickle

import pytest
import torch

from unilab_fabric.checkpoints import (
    CheckpointWriter,
    find_checkpoint,
    prune,
    read_manifest,
    read_state,
    restore,
    whole_checkpoints,
)
from unilab_fabric.errors import UserError


def write(run, tick):
    writer = CheckpointWriter(run, tick)
    writer.open()
    writer.write("replicated.pt", {"learner": {"actor": torch.arange(4.0)}, "note": ["a", 1, 2.5, None, True]})
    return writer.close({"tick": tick, "world_size": 1})


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
    with pytest.raises(UserError, match=r"replicated\.pt is missing or not"):
        read_manifest(path)
    with pytest.raises(UserError, match="it cannot be read"):
        read_state(path, "replicated.pt")


def test_a_damaged_manifest_is_refused(tmp_path):
    path = write(tmp_path, 1)
    (path / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"its manifest\.json cannot be read"):
        read_manifest(path)
    (path / "manifest.json").write_text(json.dumps({"format": 99}))
    with pytest.raises(UserError, match="its format is 99"):
        read_manifest(path)


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
