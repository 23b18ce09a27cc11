import dataclasses
from functools import partial

import pytest
import torch

from tests.offpolicy.recorder import Recorder
from tests.offpolicy.runs import SMALL
from tests.offpolicy.test_replay import Collected
from tests.ranks import run_ranks
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.offpolicy.graphs import WARM_UP, CaptureRefused, CudaGraph, GraphedBlock
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

CPU = torch.device("cpu")
SPEC = TaskSpec(
    name="counting", num_envs=3, actor_size=2, critic_size=2, action_low=(-1.0,), action_high=(1.0,), metrics=()
)
FAST = dataclasses.replace(
    SMALL, updates_per_tick=4, random_ticks=3, final_lr_fraction=0.1, n_step=3, kernels="off", max_grad_norm=1.0
)
FLASH = FlashSAC(
    batch_size=32,
    updates_per_tick=4,
    actor_width=16,
    critic_width=16,
    blocks=1,
    atoms=21,
    n_step=3,
    replay_ticks=100,
    kernels="off",
)


class Block:
    """A cycle with its learner and replay, filled from the counting environment."""

    def __init__(self, settings=FAST, *, graph=None, ticks=12, learning_starts=4, ranks=None, device=CPU, seed=1):
        ranks = ranks or Ranks()
        self.collected = Collected(ticks, n_step=settings.n_step, seed=seed, device=device)
        self.learner = settings.build(
            SPEC, device=device, precision="32-true", ranks=ranks, seed=seed, total_updates=100
        )
        generators = [self.collected.replay.generator, *self.learner.generators.values()]
        self.graphed = GraphedBlock(partial(graph, generators), ranks, device) if graph else None
        self.cycle = Cycle(self.learner, self.collected.replay, learning_starts=learning_starts, graphed=self.graphed)
        for name, tensor in self.learner.replicated.items():
            ranks.broadcast_(tensor, name)

    def run(self, cycles):
        """As many ticks, each with an action, a transition and a cycle."""
        for tick in range(cycles):
            action = self.learner.act(self.collected.handover().actor)
            self.collected.step(100 + tick, action=float(action[0, 0]))
            handover = self.collected.handover()
            self.learner.observe(handover.reward, handover.ended_env)
            self.cycle.run()
        return self

    def state(self):
        state = {name: tensor.clone() for name, tensor in self.learner.replicated.items()}
        generators = {**self.learner.generators, "replay": self.collected.replay.generator}
        return state | {name: generator.get_state() for name, generator in generators.items()}


@pytest.mark.parametrize("changed", [{}, {"actor_every": 8}, {"updates_per_tick": 3, "actor_every": 2}])
@pytest.mark.parametrize("settings", [FAST, FLASH], ids=["FastSAC", "FlashSAC"])
def test_a_recorded_cycle_does_bitwise_what_the_eager_one_does(settings, changed):
    settings = dataclasses.replace(settings, **changed)
    eager, recorded = Block(settings).run(50).state(), Block(settings, graph=Recorder).run(50)
    assert recorded.graphed.recorded
    assert not recorded.graphed.refused
    for name, tensor in recorded.state().items():
        assert torch.equal(tensor, eager[name]), name
    assert torch.equal(recorded.learner.metrics, Block(settings).run(50).learner.metrics)


def test_a_recorded_cycle_does_not_run_python_again():
    block = Block(graph=Recorder).run(WARM_UP + 1)
    block.learner.update = None  # would fail if it were called
    block.run(2)
    assert block.cycle.updates == (WARM_UP + 3) * 4


def test_each_place_of_the_period_has_its_own_recording():
    block = Block(dataclasses.replace(FAST, updates_per_tick=2, actor_every=6), graph=Recorder).run(WARM_UP + 1)
    assert list(block.graphed._graphs) == [0, 2, 4]
    actor_steps = block.learner.replicated["actor/step"]
    before = int(actor_steps)
    block.run(6)
    assert int(actor_steps) == before + 2


def test_a_replay_that_has_moved_is_recorded_anew():
    eager, recorded = Block(), Block(graph=Recorder)
    for block in (eager, recorded):
        block.run(WARM_UP + 2)
        first = block.graphed and block.graphed._graphs[0]
        block.collected.replay._grow_finals()
        block.run(5)
    assert recorded.graphed._graphs[0] is not first
    for name, tensor in recorded.state().items():
        assert torch.equal(tensor, eager.state()[name]), name


def test_a_state_loaded_in_place_is_what_the_next_replay_starts_from():
    source = Block(seed=5).run(20)
    eager, recorded = Block(), Block(graph=Recorder)
    for block in (eager, recorded):
        block.run(WARM_UP + 2)
        for name, tensor in block.learner.replicated.items():
            tensor.copy_(source.learner.replicated[name])
        block.run(5)
    for name, tensor in recorded.state().items():
        assert torch.equal(tensor, eager.state()[name]), name


@pytest.mark.parametrize(
    ("slip", "told"),
    [
        (lambda learner: float(learner.metrics.sum()), "hands a value to the host"),
        (lambda learner: learner.metrics.add_(torch.tensor([1.0, 2.0])), "takes data from the host"),
        (lambda learner: learner.metrics[learner.metrics > 0], "hands the number of rows to the host"),
    ],
)
def test_a_learner_that_breaks_the_rules_runs_eagerly_and_one_line_says_why(slip, told, capsys):
    block, eager = Block(graph=Recorder), Block()
    update = block.learner.update

    def broken(batch, index):
        update(batch, index)
        slip(block.learner)

    block.learner.update = broken
    block.run(10)
    assert told in block.graphed.refused
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1
    assert "could not be recorded into a CUDA graph and run one kernel after the other" in errors
    assert told in errors
    for name, tensor in eager.run(10).state().items():  # neither the attempt nor the fall-back shows in the run
        assert torch.equal(tensor, block.state()[name]), name


def _recorded_on_rank(ranks, settings, refusing_rank):
    class Refusing(Recorder):
        def capture(self, block):
            super().capture(block)
            raise CaptureRefused("the test says so")

    graph = Refusing if ranks.rank == refusing_rank else Recorder
    block = Block(settings, graph=graph, ranks=ranks, seed=1 + ranks.rank)
    block.run(12)
    return block.state(), block.graphed.refused


def _eager_on_rank(ranks, settings):
    return Block(settings, ranks=ranks, seed=1 + ranks.rank).run(12).state()


@pytest.mark.parametrize("settings", [FAST, FLASH], ids=["FastSAC", "FlashSAC"])
def test_if_one_rank_cannot_record_none_replays(settings):
    results = run_ranks(_recorded_on_rank, [(settings, 1)] * 2)
    assert [refused for _, refused in results] == ["rank 1 could not", "the test says so"]
    eager = run_ranks(_eager_on_rank, [(settings,)] * 2)
    for (state, _), expected in zip(results, eager, strict=True):
        for name, tensor in state.items():
            assert torch.equal(tensor, expected[name]), name


def test_updates_are_counted_from_the_start_of_the_run_and_only_once_learning_starts():
    block = Block(learning_starts=13)
    assert block.cycle.run() == 0
    block.collected.step(12)
    assert block.cycle.run() == 4
    assert int(block.learner.replicated["updates"]) == block.cycle.updates == 4


def test_a_tick_begins_a_cycle_whatever_number_of_updates_the_resumed_run_had_done():
    block, indices = Block(), []
    block.learner.update = lambda batch, index: indices.append(index)
    block.cycle.updates = 7
    block.cycle.run()
    block.cycle.run()
    assert indices == [4, 5, 6, 7, 8, 9, 10, 11]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("changed", [{}, {"updates_per_tick": 3, "actor_every": 2}])
@pytest.mark.parametrize("settings", [FAST, FLASH], ids=["FastSAC", "FlashSAC"])
def test_a_cuda_graph_does_what_the_eager_cycle_does(settings, changed):
    settings, device = dataclasses.replace(settings, **changed), torch.device("cuda", 0)
    torch.cuda.set_stream(torch.cuda.Stream(device))
    eager = Block(settings, device=device).run(50).state()
    recorded = Block(settings, graph=CudaGraph, device=device).run(50)
    assert recorded.graphed.recorded
    assert not recorded.graphed.refused
    for name, tensor in recorded.state().items():
        torch.testing.assert_close(tensor, eager[name], rtol=1e-4, atol=1e-6, msg=name)
    recorded.cycle.close()
