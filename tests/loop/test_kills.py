"""A run that is killed again and again, mostly while it writes a checkpoint, loses nothing."""

import multiprocessing
import random
import time

import torch

from tests.offpolicy.runs import run, weights
from unilab_fabric.checkpoints import find_checkpoint, read_manifest, sweep, tick_of, verify, whole_checkpoints
from unilab_fabric.config import CheckpointConfig

TICKS = 100_000
"""Ticks of the whole run, which is never reached: its horizon."""
KILLS = 50


def train(folder, until, every):
    """Continues from the newest checkpoint, if there is one."""
    torch.set_num_threads(1)
    sweep(folder)  # as `fit` does
    found = whole_checkpoints(folder)
    runner = run(
        folder, TICKS, until=until, resume=found[-1] if found else None, checkpoint=CheckpointConfig(every=every)
    )
    torch.save(weights(runner), folder / "weights.pt")


def start(context, *arguments):
    process = context.Process(target=train, args=arguments)
    process.start()
    return process


def killed_while_starting(context, folder, seconds):
    process = start(context, folder, None, 1)
    try:
        process.join(seconds)
        assert process.exitcode is None, "the run ended by itself"
    finally:
        process.kill()
        process.join()


def killed_while_running(context, folder, seconds):
    """Some time [s] after the process has begun its first checkpoint."""
    before = names(folder)
    process = start(context, folder, None, 1)
    try:
        deadline = time.monotonic() + 60
        while names(folder) <= before:
            assert time.monotonic() < deadline, "no checkpoint was begun"
            assert process.exitcode is None, "the run ended by itself"
            time.sleep(0.0005)
        process.join(seconds)
    finally:
        process.kill()
        process.join()


def names(folder):
    return {path.name for path in (folder / "checkpoints").iterdir()}


def assert_nothing_is_lost(folder):
    """Every checkpoint is whole, and its parts are of the tick in its name."""
    for path in whole_checkpoints(folder):
        verify(path)
        assert read_manifest(path)["tick"] == tick_of(path)
        replay = torch.load(path / "rank-0.pt", weights_only=True)["replay"]
        assert replay["counters"][1] == tick_of(path) - 1


def finished(context, folder, until, every):
    process = start(context, folder, until, every)
    try:
        process.join(120)
        assert process.exitcode == 0
    finally:
        process.kill()
        process.join()
    return torch.load(folder / "weights.pt", weights_only=True)


def test_a_run_that_is_killed_at_any_moment_goes_on_as_if_nothing_had_been(tmp_path, capsys):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.offpolicy.runs"])
    split, straight = tmp_path / "split", tmp_path / "straight"
    split.mkdir()
    straight.mkdir()
    moments = random.Random(3)
    finished(context, split, until=4, every=1)  # the first process waits for torch
    begun = time.monotonic()
    finished(context, split, until=6, every=1)
    start_s = time.monotonic() - begun
    while_writing = newest = 0
    for kill in range(KILLS):
        if kill % 5 == 0:
            killed_while_starting(context, split, moments.uniform(0.0, start_s))
        else:
            killed_while_running(context, split, moments.uniform(0.0, 0.1))
        while_writing += any(name.endswith(".partial") for name in names(split))
        assert_nothing_is_lost(split)
        last = tick_of(find_checkpoint(str(split), log_root=tmp_path, run_name=None))
        assert last >= newest
        newest = last
    assert while_writing >= KILLS // 10
    end = newest + 25
    resumed = finished(context, split, end, every=1)
    expected = finished(context, straight, end, every=0)
    with capsys.disabled():
        print(f"\n{KILLS} kills, {while_writing} of them while a checkpoint was written, up to tick {end}: none lost")
    assert expected["updates"] > 0
    assert [name for name in expected if not torch.equal(expected[name], resumed[name])] == []
    ours, theirs = (
        torch.load(whole_checkpoints(folder)[-1] / "rank-0.pt", weights_only=True) for folder in (split, straight)
    )
    for part in ("replay", "generators"):
        assert all(torch.equal(ours[part][name], theirs[part][name]) for name in theirs[part])
