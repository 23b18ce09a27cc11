"""Traces of some ticks: they hold the phases, and training does not notice."""

import json

import pytest
import torch

from tests.offpolicy.runs import run, weights
from tests.ranks import run_ranks
from unilab_fabric.learners.ppo.config import PPO

PPO_SMALL = PPO(num_steps_per_env=8, num_mini_batches=2, actor_hidden=(16,), critic_hidden=(16,))


def phases(folder, rank=0):
    """How often each phase stands in a rank's trace."""
    events = json.loads((folder / "profile" / f"rank-{rank}.pt.trace.json").read_text())["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    return {name: names.count(name) for name in ("wait", "commit", "act", "update")}


def test_a_trace_holds_the_phases_of_its_ticks_and_changes_nothing(tmp_path, capsys):
    traced = run(tmp_path / "a", 40, profile=4)
    assert phases(tmp_path / "a") == {"wait": 4, "commit": 4, "act": 4, "update": 4}
    assert f"profile: {tmp_path / 'a' / 'profile'}, for Perfetto or TensorBoard" in capsys.readouterr().err
    plain = run(tmp_path / "b", 40)
    assert not (tmp_path / "b" / "profile").exists()
    before, after = weights(plain), weights(traced)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_trace_that_the_run_s_end_cuts_short_is_written(tmp_path):
    run(tmp_path, 20, profile=1000)
    assert 0 < phases(tmp_path)["update"] < 20


def test_a_run_that_never_settles_says_that_nothing_was_traced(tmp_path, capsys):
    run(tmp_path, 8, profile=4)
    assert "warning: the run was too short for a profile" in capsys.readouterr().err
    assert not (tmp_path / "profile").exists()


def test_an_iteration_of_ppo_is_traced_whole(tmp_path):
    run(tmp_path, 48, learner=PPO_SMALL, profile=1)
    assert phases(tmp_path) == {"wait": 9, "commit": 16, "act": 8, "update": 1}


def _traced(ranks, folder):
    run(folder, 40, ranks=ranks, profile=2)


@pytest.mark.parametrize("size", [2])
def test_every_rank_has_a_trace_of_the_same_ticks(tmp_path, size):
    run_ranks(_traced, [(tmp_path,)] * size)
    assert [phases(tmp_path, rank)["update"] for rank in range(size)] == [2, 2]
