"""Waits that name who did not arrive, and calls that are compared before they are made."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.ranks import run_ranks
from unilab_fabric.errors import PeerStalled
from unilab_fabric.parallel.calls import CallLog, CollectiveMismatch
from unilab_fabric.parallel.presence import REQUEST_TIMEOUT, Presence
from unilab_fabric.parallel.reduce import Ranks


def present(ranks, folder, stall_s=4.0, pause_s=60.0):
    """The same ranks, with a presence through a store that rank 0 keeps."""
    port = folder / "port"
    if ranks.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=REQUEST_TIMEOUT)
        port.write_text(f"{store.port} ")
        ranks.barrier("port is known")
    else:
        ranks.barrier("port is known")
        number = int(port.read_text())
        store = dist.TCPStore("127.0.0.1", number, is_master=False, wait_for_workers=False, timeout=REQUEST_TIMEOUT)
    dist.distributed_c10d._set_pg_timeout(timedelta(days=1), dist.group.WORLD)
    presence = Presence(
        ranks.rank,
        ranks.world_size,
        store,
        store_is_with_rank_0=True,
        stall_timeout_s=stall_s,
        pause_timeout_s=pause_s,
    )
    return Ranks(ranks.rank, ranks.world_size, presence=presence), store


def meet(ranks):
    ranks.barrier("meeting")
    return "met"


def late_rank(ranks, folder, what, kind, late_s):
    ranks, _store = present(ranks, folder)
    buffer = torch.ones(3)
    ranks.sum_(buffer, "a number")
    if ranks.rank == 1:
        with ranks.doing(what, kind):
            time.sleep(late_s)
    try:
        return meet(ranks)
    except PeerStalled as error:
        os._exit(0) if ranks.rank else None
        return error.rank, str(error)


def test_a_rank_that_computes_too_long_is_named_with_the_call_that_waits_for_it(tmp_path):
    first = until_stalled(tmp_path, "counting sheep", "works", 60)
    assert first[0] == 1
    assert first[1].startswith("rank 1 did not arrive at barrier meeting (collective 2), where rank 0 has waited 4 s; ")
    assert "counting sheep" in first[1]
    assert "it is alive" in first[1]


def test_a_rank_that_says_it_pauses_is_waited_for(tmp_path, capfd):
    assert run_ranks(late_rank, [(tmp_path, "in a hook's on_log", "pauses", 9)] * 2) == ["met", "met"]
    said = capfd.readouterr().err
    assert said.count("rank 0 has waited 2 s at barrier meeting for rank 1") == 1
    assert "in a hook's on_log" in said


def stopped_rank(ranks, folder, victim):
    ranks, _store = present(ranks, folder)
    ranks.sum_(torch.ones(3), "a number")
    if ranks.rank == victim:
        with ranks.doing("in a hook's on_log", "pauses"):
            time.sleep(1.5)  # it has told of itself once more
            os.kill(os.getpid(), signal.SIGSTOP)
    try:
        meet(ranks)
    except PeerStalled as error:
        (folder / "told").write_text(f"{error.rank} {error}")
        os._exit(1)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_rank_is_named_even_if_it_paused_or_keeps_the_store(tmp_path, victim):
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        run_ranks(stopped_rank, [(tmp_path, victim)] * 2)
    told = (tmp_path / "told").read_text()
    assert told.startswith(f"{victim} rank {victim} did not arrive at barrier meeting")
    assert "sign of life" in told or "does not answer" in told


def until_stalled(folder, what, kind, late_s):
    """What rank 0 says; rank 1 is ended by then."""
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        run_ranks(stalled_rank_zero, [(folder, what, kind, late_s)] * 2)
    rank, _, text = (folder / "told").read_text().partition(" ")
    return int(rank), text


def stalled_rank_zero(ranks, folder, what, kind, late_s):
    outcome = late_rank(ranks, folder, what, kind, late_s)
    (folder / "told").write_text(f"{outcome[0]} {outcome[1]}")
    os._exit(1)  # the other one sleeps, so nobody could close the group in good order


def slip_a_barrier(ranks):
    if ranks.rank == 0:
        ranks.barrier("on rank 0 only")
    ranks.sum_(torch.ones(3), "a number")


def compared(ranks, folder, function):
    _, store = present(ranks, folder)
    ranks = Ranks(ranks.rank, ranks.world_size, calls=CallLog(ranks.rank, ranks.world_size, store, deadline_s=10))
    for _ in range(3):
        ranks.sum_(torch.ones(2), "a number")
    try:
        function(ranks)
    except CollectiveMismatch as error:
        (folder / f"told {ranks.rank}").write_text(str(error))
    store.set(f"over/{ranks.rank}", "")
    store.wait(["over/0", "over/1"])


def test_calls_that_differ_are_named_with_both_call_sites(tmp_path):
    run_ranks(compared, [(tmp_path, slip_a_barrier)] * 2)
    for rank in (0, 1):
        told = (tmp_path / f"told {rank}").read_text()
        assert told.startswith("the ranks differ in their collective 4: rank 0: barrier on rank 0 only at ")
        assert told.count("test_presence.py:") == 2
        assert told.count("in slip_a_barrier") == 2
        assert "rank 1: all_reduce of a number (3,) torch.float32 at " in told


def sizes_differ(ranks):
    ranks.sum_(torch.ones(3 + ranks.rank), "a number")


def test_sizes_that_differ_are_a_mismatch_too(tmp_path):
    run_ranks(compared, [(tmp_path, sizes_differ)] * 2)
    assert "(3,)" in (tmp_path / "told 0").read_text()
    assert "(4,)" in (tmp_path / "told 0").read_text()


def waiting_for_a_device(ranks, folder):
    ranks, _store = present(ranks, folder)
    with ranks.as_one():  # as a graph with collectives does
        for _ in range(ranks.rank):  # of which a rank may record more than another
            ranks.presence.enter()
    assert ranks.presence.calls == 1
    if ranks.rank == 1:
        time.sleep(60)
    with ranks.as_one():
        pass
    try:
        ranks.wait_for_device(lambda: False, "the actions")
    except PeerStalled as error:
        (folder / "told").write_text(f"{error.rank} {error}")
        os._exit(1)


def test_a_device_that_waits_for_a_rank_in_a_graph_names_that_rank(tmp_path):
    """The graph's collectives are known to nobody but the device: the host's wait for it has to find out."""
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        run_ranks(waiting_for_a_device, [(tmp_path,)] * 2)
    told = (tmp_path / "told").read_text()
    assert told.startswith("1 rank 1 did not arrive at the updates before the actions (collective 2), where rank 0 has")


def foreign_collectives(ranks, folder, late_s):
    ranks, _store = present(ranks, folder)
    try:
        with ranks.bounded("another library's updates"):
            if ranks.rank == 1:
                time.sleep(late_s)
            dist.all_reduce(torch.ones(3))
    except PeerStalled as error:
        (folder / "told").write_text(f"{error.rank} {error}")
        os._exit(1)
    return ranks.presence.calls


def test_collectives_of_another_library_wait_no_longer_than_ours(tmp_path):
    with pytest.raises(AssertionError, match="exit codes of the ranks"):
        run_ranks(foreign_collectives, [(tmp_path, 60)] * 2)
    told = (tmp_path / "told").read_text()
    assert told.startswith("1 rank 1 did not arrive at another library's updates (collective ")


def test_collectives_of_another_library_may_take_their_time(tmp_path):
    assert run_ranks(foreign_collectives, [(tmp_path, 1)] * 2) == [2, 2]
