import pytest
import torch

from tests.ranks import run_ranks
from unilab_fabric.parallel.flat import FlatParameters
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


def gradient_means(ranks, wire):
    module = torch.nn.Linear(3, 2)
    flat = FlatParameters(module, tail=2)
    flat.gradient.copy_(torch.linspace(-1.0, 1.0, len(flat.gradient)) * (1.001 + ranks.rank))
    flat.tail.copy_(torch.tensor([1.0 + 1e-6, 3.0]) * (1 + ranks.rank))
    wired = Ranks(ranks.rank, ranks.world_size, gradient_wire=wire)
    address = flat.reduced.data_ptr()
    wired.mean_gradient_(flat, "actor")
    assert flat.reduced.data_ptr() == address
    return flat.gradient.clone(), flat.tail.clone()


def test_a_narrow_wire_rounds_the_gradient_alone_and_alike_on_all_ranks():
    exact = run_ranks(gradient_means, [(torch.float32,)] * 2)[0]
    (gradient, tail), other = run_ranks(gradient_means, [(torch.bfloat16,)] * 2)
    assert torch.equal(gradient, other[0])
    assert torch.equal(tail, exact[1])
    torch.testing.assert_close(gradient, exact[0], rtol=2**-7, atol=1e-6)
    assert not torch.equal(gradient, exact[0])
    assert torch.equal(gradient, gradient.bfloat16().float())


def test_waiting_for_a_device_ends_when_it_is_done():
    looks = iter([False] * 300 + [True])
    Ranks().wait_for_device(lambda: next(looks), "the actions")
    assert next(looks, "all looked at") == "all looked at"
