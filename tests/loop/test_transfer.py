import numpy as np
import pytest
import torch

from unilab_fabric.loop.slots import HEAD, NUM_SLOTS, map_slots, slot_bytes
from unilab_fabric.loop.transfer import CopiedTransfer, CudaCopies, SharedTransfer
from unilab_fabric.memory import anonymous_memory
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

CPU = torch.device("cpu")
SPEC = TaskSpec(
    name="odd sizes",
    num_envs=5,
    actor_size=3,
    critic_size=7,
    action_low=(-1.0,) * 2,
    action_high=(1.0,) * 2,
    metrics=(),
)


class HostCopies:
    """A device that is the host, and whose work takes three looks."""

    def __init__(self):
        self.pinned = None
        self.calls = []
        self.looks = 0

    def pin(self, memory):
        self.pinned = memory
        self.calls.append("pin")

    def unpin(self):
        self.calls.append("unpin")

    def aside(self, copy):
        copy()

    def mark(self):
        self.looks = 0

        def done():
            self.looks += 1
            return self.looks > 3

        return done


def filled_slots(seed=0):
    slots = map_slots(anonymous_memory(NUM_SLOTS * slot_bytes(SPEC)), SPEC)
    random = np.random.default_rng(seed)
    for slot in slots:
        for name in (*HEAD, "final_actor", "final_critic"):
            field = getattr(slot, name)
            field[:] = random.random(field.shape) > 0.5 if field.dtype == bool else random.random(field.shape)
        slot.ended[0] = 2
        slot.ended_env[:2] = [4, 1]
    return slots


def devices():
    cuda = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="")])
    return pytest.mark.parametrize("device", ["cpu", cuda])


def copied(slots, device):
    copies = CudaCopies(torch.device(device)) if device == "cuda" else HostCopies()
    return CopiedTransfer(slots, torch.device(device), copies, Ranks()), copies


@devices()
def test_a_handover_on_a_device_holds_what_one_in_shared_memory_does(device):
    slots = filled_slots()
    transfer, _ = copied(slots, device)
    for slot in slots:
        expected, found = SharedTransfer().take(slot), transfer.take(slot)
        for name, tensor in vars(expected).items():
            assert torch.equal(tensor, getattr(found, name).cpu()), name
        assert found.ended_env.tolist() == [4, 1]
    transfer.close()


@devices()
def test_the_other_slots_twin_does_not_change_when_one_is_taken(device):
    slots = filled_slots()
    transfer, _ = copied(slots, device)
    first = transfer.take(slots[0])
    before = {name: tensor.clone() for name, tensor in vars(first).items()}
    slots[1].actor[:] = -7.0
    transfer.take(slots[1])
    for name, tensor in before.items():
        assert torch.equal(tensor, getattr(first, name)), name
    transfer.close()


@devices()
def test_what_the_collector_writes_later_is_not_seen_until_the_slot_is_taken_again(device):
    slots = filled_slots()
    transfer, _ = copied(slots, device)
    reward = transfer.take(slots[0]).reward
    if device == "cuda":
        torch.cuda.synchronize()
    kept = reward.clone()
    slots[0].reward[:] = 9.0
    assert torch.equal(reward, kept)
    assert transfer.take(slots[0]).reward.tolist() == [9.0] * 5
    transfer.close()


@devices()
def test_actions_stand_in_the_slot_when_give_returns(device):
    slots = filled_slots()
    transfer, copies = copied(slots, device)
    action = torch.arange(10.0, device=device).view(5, 2)
    transfer.give(action, slots[1])
    assert slots[1].action.tolist() == action.tolist()
    if device == "cpu":
        assert copies.looks > 3
    transfer.close()


def test_all_slots_are_pinned_as_one_block_and_let_go():
    slots = filled_slots()
    transfer, copies = copied(slots, "cpu")
    first = np.frombuffer(slots[0].memory, np.uint8)
    assert copies.pinned.ctypes.data == first.ctypes.data
    assert copies.pinned.nbytes == NUM_SLOTS * slot_bytes(SPEC)
    transfer.close()
    assert copies.calls == ["pin", "unpin"]


def test_no_episode_ended_hands_over_no_row():
    slots = filled_slots()
    slots[0].ended[0] = 0
    transfer, _ = copied(slots, "cpu")
    found = transfer.take(slots[0])
    assert len(found.ended_env) == len(found.final_actor) == len(found.final_critic) == 0
    assert len(SharedTransfer().take(slots[0]).ended_env) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_slots_are_page_locked_for_cuda():
    slots = filled_slots()
    transfer, _ = copied(slots, "cuda")
    assert torch.from_numpy(slots[1].actor).is_pinned()
    transfer.close()
    assert not torch.from_numpy(slots[1].actor).is_pinned()
