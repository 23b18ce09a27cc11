"""Jobs of two and three ranks, each a process with its own collector."""

import pytest
import torch

from tests.offpolicy.runs import run, weights
from tests.ranks import run_ranks
from unilab_fabric.checkpoints import whole_checkpoints
from unilab_fabric.hooks.hook import Hook
from unilab_fabric.learners.flash_sac.config import FlashSAC


def train(ranks, folder, ticks, options):
    runner = run(folder, ticks, ranks=ranks, **options)
    return {"weights": weights(runner), "env_steps": runner.env_steps, "tick": runner.tick, "warning": runner.warning}


def job(world_size, folder, ticks, **options):
    return run_ranks(train, [(folder, ticks, options)] * world_size)


def same(first, second):
    differing = [name for name in first["weights"] if not torch.equal(first["weights"][name], second["weights"][name])]
    assert not differing, f"not bitwise equal: {differing}"


@pytest.mark.parametrize("world_size", [2, 3])
def test_replicas_stay_bitwise_equal_and_a_second_job_repeats_them(tmp_path, world_size):
    first = job(world_size, tmp_path / "a", 200)
    second = job(world_size, tmp_path / "b", 200)
    assert [rank["env_steps"] for rank in first] == [200 * 8 * world_size] * world_size
    for rank in first[1:] + second:
        same(first[0], rank)


def test_two_ranks_resume_bit_for_bit(tmp_path):
    straight = job(2, tmp_path / "straight", 120)
    stopped = job(2, tmp_path / "split", 120, until=33, log_every=10)
    assert [rank["tick"] for rank in stopped] == [34, 34]  # the vote of tick 33 is read at tick 34
    resumed = job(2, tmp_path / "split", 120, resume=whole_checkpoints(tmp_path / "split")[-1])
    assert [rank["warning"] for rank in resumed] == ["", ""]
    same(straight[0], resumed[0])
    same(straight[0], resumed[1])


FLASH = FlashSAC(
    actor_width=8, critic_width=8, blocks=1, batch_size=32, updates_per_tick=2, replay_ticks=100, learning_starts=4
)


def test_two_ranks_of_flash_sac_stay_equal_and_resume_bit_for_bit(tmp_path):
    straight = job(2, tmp_path / "straight", 80, learner=FLASH, replica_check_every=1)
    job(2, tmp_path / "split", 80, learner=FLASH, until=33)
    resumed = job(2, tmp_path / "split", 80, learner=FLASH, resume=whole_checkpoints(tmp_path / "split")[-1])
    same(straight[0], straight[1])
    same(straight[0], resumed[0])
    same(straight[0], resumed[1])


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_another_number_of_ranks_keeps_the_replicated_state_and_says_what_starts_anew(tmp_path, before, after):
    first = job(before, tmp_path, 40)
    second = job(after, tmp_path, 90, resume=whole_checkpoints(tmp_path)[-1])
    assert second[0]["warning"] == (
        f"the checkpoint is of {before} rank(s) and this job has {after}: replicated state continues; environments, "
        "replay and generators start anew"
    )
    for rank in second[1:]:
        same(second[0], rank)
    assert second[0]["weights"]["updates"] > first[0]["weights"]["updates"]
    # the end is given in the job's steps, and what the first job did counts: the first tick at or past it is the last
    end = 90 * 8 * after
    assert end <= second[0]["env_steps"] < end + 8 * after
    assert (second[0]["env_steps"] - first[0]["env_steps"]) % (8 * after) == 0


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3)])
def test_with_as_many_environments_as_before_the_replay_continues_too(tmp_path, before, after):
    first = job(before, tmp_path, 40, init_args={"num_envs": 24 // before})
    second = job(after, tmp_path, 60, init_args={"num_envs": 24 // after}, resume=whole_checkpoints(tmp_path)[-1])
    assert second[0]["warning"] == (
        f"the checkpoint is of {before} rank(s) and this job has {after}: replicated state and replay continue; "
        "environments and generators start anew"
    )
    for rank in second[1:]:
        same(second[0], rank)
    assert second[0]["env_steps"] == 24 * 60
    # no tick without an update: replay is full enough at once
    assert second[0]["weights"]["updates"] == first[0]["weights"]["updates"] + 20


class StopOnRankOne(Hook):
    """Asks for the end, on one rank only."""

    def __init__(self, rank):
        self._rank = rank

    def on_tick_end(self, run):
        if self._rank == 1 and run.tick == 13:
            run.stop("rank 1 has had enough")


def stop_on_one_rank(ranks, folder):
    runner = run(folder, 100, ranks=ranks, hooks=[StopOnRankOne(ranks.rank)], log_every=10)
    return runner.tick, runner.stop_reason


def test_one_rank_that_wants_to_stop_stops_all_at_the_same_tick(tmp_path):
    results = run_ranks(stop_on_one_rank, [(tmp_path,)] * 2)
    assert [tick for tick, _ in results] == [14, 14]
    assert len(whole_checkpoints(tmp_path)) == 1
