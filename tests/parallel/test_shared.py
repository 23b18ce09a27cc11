"""Sums in shared memory: the right ones, the same bits everywhere, and no wait without an end."""

import os
import subprocess
import time
from dataclasses import replace

import pytest
import torch

from tests.ranks import run_ranks
from unilab_fabric.errors import PeerLost
from unilab_fabric.memory import anonymous_memory
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.shared import CAPACITY, PeerGone, open_shared_sum

SIZES = (1, 7, 1000, CAPACITY, CAPACITY + 1, 2 * CAPACITY + 5)


def opened(ranks):
    """Ranks that add up in shared memory; skips where that is not possible."""
    shared = open_shared_sum(ranks.rank, ranks.world_size, ranks.gather)
    return replace(ranks, shared=shared)


def parts(ranks, size):
    """What each rank gives."""
    return [torch.randn(size, generator=torch.Generator().manual_seed(size + rank)) for rank in range(ranks.world_size)]


def _sums(ranks):
    ranks = opened(ranks)
    if ranks.shared is None:
        return None
    results = []
    for size in SIZES:
        buffer = parts(ranks, size)[ranks.rank].clone()
        ranks.sum_(buffer, "it")
        results.append((buffer, parts(ranks, size)))
    return results


@pytest.fixture(params=[2, 3])
def world_size(request):
    if run_ranks(_sums, [()] * 2)[0] is None:
        pytest.skip("no shared memory here: no C compiler, or not Linux")
    return request.param


def test_sums_are_those_in_the_order_of_ranks_to_the_bit(world_size):
    every = run_ranks(_sums, [()] * world_size)
    for results in every:
        for buffer, given in results:
            expected = given[0].clone()
            for other in given[1:]:
                expected += other
            assert torch.equal(buffer, expected)


def _many(ranks, seed):
    ranks, generator = opened(ranks), torch.Generator().manual_seed(seed)
    wrong = 0
    for call in range(3000):
        if torch.rand((), generator=generator) < 0.01:
            time.sleep(0.002)  # ranks overtake each other by as much as they may
        buffer = torch.full((50,), float(call * (ranks.rank + 1)))
        ranks.sum_(buffer, "it")
        expected = call * ranks.world_size * (ranks.world_size + 1) / 2
        wrong += not bool((buffer == expected).all())
    return wrong


def test_no_call_mixes_with_another_however_the_ranks_are_timed(world_size):
    assert run_ranks(_many, [(rank,) for rank in range(world_size)]) == [0] * world_size


def _means(ranks):
    ranks = opened(ranks)
    wide, exact = torch.full((4,), float(ranks.rank)), torch.full((4,), ranks.rank, dtype=torch.float64)
    ranks.mean_(wide, "it")
    ranks.mean_(exact, "another")  # through gloo
    return wide.tolist(), exact.tolist()


def test_what_is_not_float32_goes_through_gloo(world_size):
    mean = (world_size - 1) / 2
    assert run_ranks(_means, [()] * world_size) == [([mean] * 4, [mean] * 4)] * world_size


def _one_without_a_compiler(ranks):
    if ranks.rank == 1:
        os.environ["CC"] = "no_such_compiler"
    ranks = opened(ranks)
    buffer = torch.ones(3)
    ranks.sum_(buffer, "it")
    return ranks.shared is None, buffer.tolist()


def test_where_one_rank_cannot_all_use_gloo():
    assert run_ranks(_one_without_a_compiler, [()] * 2) == [(True, [2.0, 2.0, 2.0])] * 2


class Late(Exception):
    """The test has waited for as long as it wanted to."""


def give_up(waited_s):
    raise Late(waited_s)


@pytest.mark.parametrize("alive", [True, False])
def test_a_rank_that_does_not_come_is_looked_at_and_one_that_is_gone_is_named(alive):
    peer = subprocess.Popen(["sleep", "60"])
    try:
        if not alive:
            peer.kill()  # not waited for, so what is left of it still has its number
        answers = [torch.tensor([[0, 0, 0], [peer.pid, 0, 0]]), torch.ones(2, 1)]

        def gather(row, name):
            answer = answers.pop(0)
            if len(answers) == 1:
                answer[0] = row
            return answer

        shared = open_shared_sum(0, 2, gather)
        if shared is None:
            pytest.skip("no shared memory here")
        said = pytest.raises(Late) if alive else pytest.raises(PeerGone, match=f"rank 1, process {peer.pid}, is gone")
        with said:
            shared.sum_(torch.ones(3), give_up)
    finally:
        peer.kill()
        peer.wait()


@pytest.mark.parametrize("wrong", ["another file", "another memory"])
def test_what_is_not_rank_0_s_memory_is_left_alone(wrong, tmp_path, capsys):
    (tmp_path / "file").write_bytes(b"important")
    with (tmp_path / "file").open("r+b") as file:
        memory = anonymous_memory(1 << 23)
        found = {"another file": file.fileno(), "another memory": memory}[wrong]
        rows = torch.tensor([[os.getpid(), found, 7], [os.getpid(), -1, 8]])
        answers = [rows, torch.tensor([[True], [False]])]
        assert open_shared_sum(1, 2, lambda row, name: answers.pop(0)) is None
        os.close(memory)
    assert (tmp_path / "file").read_bytes() == b"important"
    assert "gradients travel through gloo and not through memory: rank 0 is out of sight" in capsys.readouterr().err


def _told(ranks):
    ranks = replace(ranks, shared=Gone())
    with pytest.raises(PeerLost) as lost:
        ranks.sum_(torch.ones(3), "it")
    return str(lost.value)


class Gone:
    """A sum whose peer has ended."""

    def sum_(self, buffer, look):
        raise PeerGone(1, 42)


def test_a_rank_that_is_gone_ends_the_call_as_any_lost_peer_does():
    assert _told(Ranks(0, 2)) == "rank 0: all_reduce of it could not finish: rank 1, process 42, is gone"
