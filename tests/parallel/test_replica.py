import pytest
import torch

from tests.ranks import run_ranks
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.replica import ReplicasDiffer, check_replicas, checksum


def state():
    return {
        "critic": torch.linspace(-1.0, 1.0, 1000),
        "critic/step": torch.tensor(7.0),
        "normaliser/mean": torch.linspace(0.0, 1.0, 9, dtype=torch.float64),
        "shadow": torch.linspace(0.0, 1.0, 9).bfloat16(),
        "updates": torch.tensor(12),
        "flag": torch.tensor(True),
    }


@pytest.mark.parametrize("group", list(state()))
def test_one_flipped_bit_changes_the_checksum_of_its_group_alone(group):
    changed = state()
    flat = changed[group].reshape(-1).view(torch.uint8)
    flat[-1] ^= 1
    differs = (checksum(state()) != checksum(changed)).any(-1)
    assert [name for name, differ in zip(changed, differs, strict=True) if differ] == [group]


def test_the_checksum_sees_two_elements_that_change_by_opposite_amounts():
    changed = state()
    changed["updates"] = torch.tensor([11, 13])
    original = state() | {"updates": torch.tensor([12, 12])}
    assert not torch.equal(checksum(original), checksum(changed))


def test_not_a_number_equals_itself():
    nan = {"critic": torch.tensor([torch.nan])}
    assert torch.equal(checksum(nan), checksum({"critic": torch.tensor([torch.nan])}))


def message_of_check(ranks, flipped):
    own = state()
    for group in flipped:
        own[group].reshape(-1).view(torch.uint8)[0] ^= 1
    try:
        check_replicas(own, ranks, tick=500)
    except ReplicasDiffer as error:
        return str(error)
    return None


def test_the_error_names_groups_and_ranks_and_reaches_every_rank():
    flipped = [(), ("critic", "updates"), ("updates",)]
    messages = run_ranks(message_of_check, [(own,) for own in flipped])
    expected = "tick 500: replicated state differs from rank 0's: critic on rank 1; updates on rank 1, 2"
    assert messages == [expected] * 3


def test_equal_replicas_pass():
    assert run_ranks(message_of_check, [((),), ((),)]) == [None, None]


def test_one_rank_has_nothing_to_compare():
    check_replicas(state(), Ranks(), tick=0)
