import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.offpolicy.runs import SMALL
from tests.offpolicy.test_replay import Collected
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

READS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::unique_consecutive"}
"""Operations that hand a value of a tensor to the host, which on a GPU waits for everything before it."""


class NoHostReads(TorchDispatchMode):
    """Refuses operations whose result the host must see."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function._schema.name not in READS, f"{function} reads a tensor back"
        return function(*args, **(kwargs or {}))


def cycle(learning_starts=4, updates_per_tick=4):
    collected = Collected(12, n_step=2)
    spec = TaskSpec(
        name="counting",
        num_envs=3,
        actor_size=2,
        critic_size=2,
        action_low=(-1.0,),
        action_high=(1.0,),
        metrics=(),
    )
    settings = type(SMALL)(**{**SMALL.__dict__, "updates_per_tick": updates_per_tick, "random_ticks": 3})
    learner = settings.build(
        spec, device=torch.device("cpu"), precision="32-true", ranks=Ranks(), seed=1, total_updates=100
    )
    return Cycle(learner, collected.replay, learning_starts=learning_starts), learner, collected


def test_a_cycle_reads_nothing_back():
    block, learner, collected = cycle()
    block.run()
    with NoHostReads():
        for _ in range(3):
            learner.act(torch.from_numpy(collected.slot.actor))
            block.run()
    assert block.updates == 16


def test_the_guard_sees_a_host_read():
    with NoHostReads(), pytest.raises(AssertionError, match="reads a tensor back"):
        torch.ones(1).item()


def test_updates_are_counted_from_the_start_of_the_run_and_only_once_learning_starts():
    block, learner, collected = cycle(learning_starts=13)
    assert block.run() == 0
    collected.step(12)
    assert block.run() == 4
    assert int(learner.replicated["updates"]) == block.updates == 4
