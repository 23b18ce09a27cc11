"""Ranks that agree on when to stop."""

import pytest
import torch

from tests.ranks import run_ranks
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.vote import StopVote


def outcomes(ranks, codes):
    vote = StopVote(ranks, torch.device("cpu"))
    return [vote.exchange(code) for code in codes], vote.close()


def test_alone_a_code_counts_at_once():
    assert outcomes(Ranks(), [0, 0, 15]) == ([0, 0, 15], 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_every_rank_reads_the_largest_code_one_exchange_later(world_size):
    codes = [[0, 0, 0, 0]] * (world_size - 1) + [[0, 15, 2, 0]]
    assert run_ranks(outcomes, [(own,) for own in codes]) == [([0, 0, 15, 2], 0)] * world_size
