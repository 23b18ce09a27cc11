import pytest
import torch

from tests.ranks import run_ranks
from unilab_fabric.parallel.reduce import Ranks


def collectives(ranks, own):
    mean, total, first = own.clone(), own.clone(), own.clone()
    ranks.mean_(mean, "a")
    ranks.sum_(total, "b")
    ranks.broadcast_(first, "c")
    return mean, total, first, ranks.gather(own, "d")


@pytest.mark.parametrize("world_size", [2, 3])
def test_mean_sum_broadcast_and_gather_over_processes(world_size):
    own = [torch.tensor([1.0, 10.0]) * (rank + 1) for rank in range(world_size)]
    results = run_ranks(collectives, [(tensor,) for tensor in own])
    stacked = torch.stack(own)
    for mean, total, first, gathered in results:
        torch.testing.assert_close(mean, stacked.mean(0))
        torch.testing.assert_close(total, stacked.sum(0))
        assert torch.equal(first, own[0])
        assert torch.equal(gathered, stacked)
    assert all(torch.equal(results[0][0], mean) for mean, _, _, _ in results)


def message_for_a_column(ranks):
    try:
        ranks.sum_(torch.zeros(4, 4)[:, 0], "a column")
    except ValueError as error:
        return str(error)
    return None


def test_a_strided_buffer_is_refused():
    assert run_ranks(message_for_a_column, [(), ()]) == ["a collective needs a contiguous buffer, not strides (4,)"] * 2


def test_alone_a_collective_changes_nothing():
    mean, total, first, gathered = collectives(Ranks(), torch.tensor([1.0, 2.0]))
    assert mean.tolist() == total.tolist() == first.tolist() == [1.0, 2.0]
    assert gathered.tolist() == [[1.0, 2.0]]
