"""How fast are the updates of a tick on a CUDA device: as one graph, as a graph per update, and eagerly?

The reference is the eager way, one kernel launch after the other. The floor is what the device could not beat: the
larger of the bytes that the updates must move over the bandwidth measured here, and of their arithmetic over the rate
measured here with one large product of the same precision. It leaves out everything that could stay in caches, so it
is a bound, not a forecast.

    python benchmarks/cuda_cycle.py [--json PATH] [--quick]

Without a CUDA device it says so and measures nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from shared.timing import in_turn, machine, table

from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.learner import Learner, OffPolicyConfig
from unilab_fabric.loop.transfer import Handover
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.offpolicy.graphs import CudaGraph, GraphedBlock
from unilab_fabric.offpolicy.replay import Replay
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

REFERENCE = "eager"
G1 = TaskSpec(
    name="G1",
    num_envs=2048,
    actor_size=98,
    critic_size=101,
    action_low=(-1.0,) * 29,
    action_high=(1.0,) * 29,
    metrics=(),
)
SIZES: dict[str, OffPolicyConfig] = {
    "FastSAC, G1, batch 8192, 8 updates": FastSAC(replay_ticks=256),
    "FlashSAC, G1, batch 2048, 2 updates": FlashSAC(replay_ticks=256),
}


@dataclass(frozen=True)
class Rates:
    """What the device does at best."""

    bytes_per_s: float
    flop_per_s: float


def block(settings: OffPolicyConfig, device: torch.device, precision: str) -> tuple[Learner, Replay]:
    """A learner and a replay that is full of made-up transitions."""
    learner = settings.build(G1, device, precision, Ranks(), 1, 1_000_000)
    replay = Replay(
        G1, ticks=settings.replay_ticks, n_step=settings.n_step, discount=settings.discount, device=device, seed=1
    )
    generator = torch.Generator(device).manual_seed(2)
    normal = partial(torch.randn, device=device, generator=generator)
    for tick in range(settings.learning_starts + 10):
        handover = Handover(
            action=normal(G1.num_envs, G1.action_size).tanh(),
            actor=normal(G1.num_envs, G1.actor_size),
            critic=normal(G1.num_envs, G1.critic_size),
            reward=0.1 * normal(G1.num_envs),
            terminated=torch.zeros(G1.num_envs, dtype=torch.bool, device=device),
            ended_env=torch.zeros(0, dtype=torch.int64, device=device),
            final_actor=torch.zeros(0, G1.actor_size, device=device),
            final_critic=torch.zeros(0, G1.critic_size, device=device),
        )
        if tick == 0:
            replay.begin(0, handover)
        else:
            replay.commit(handover)
            learner.observe(handover.reward, handover.ended_env)
    return learner, replay


class PerUpdate:
    """One graph for each update of a period: what a learner gets that captures only its own update."""

    def __init__(self, learner: Learner, replay: Replay, device: torch.device) -> None:
        generators = [replay.generator, *learner.generators.values()]
        self._learner, self._replay = learner, replay
        self._graphed = GraphedBlock(partial(CudaGraph, generators), Ranks(), device)
        self._index = 0

    def __call__(self) -> None:
        period = max(self._learner.period, self._learner.updates_per_tick)
        for _ in range(self._learner.updates_per_tick):
            self._graphed.run(self._index % period, range(period), self._update, ())
            self._index += 1

    def _update(self, index: int) -> None:
        self._learner.update(self._replay.sample(self._learner.batch_size), index)


def ways(settings: OffPolicyConfig, device: torch.device, precision: str) -> dict[str, Callable[[], None]]:
    """A tick's updates in each way, until the device is done."""

    def until_done(run: Callable[[], object]) -> Callable[[], None]:
        def timed() -> None:
            run()
            torch.cuda.synchronize()

        return timed

    learner, replay = block(settings, device, precision)
    eager = Cycle(learner, replay, learning_starts=settings.learning_starts)
    learner, replay = block(settings, device, precision)
    generators = [replay.generator, *learner.generators.values()]
    graphed = GraphedBlock(partial(CudaGraph, generators), Ranks(), device)
    captured = Cycle(learner, replay, learning_starts=settings.learning_starts, graphed=graphed)
    per_update = PerUpdate(*block(settings, device, precision), device)
    for _ in range(5):
        captured.run()
    if graphed.refused:
        sys.exit(f"error: the updates could not be recorded: {graphed.refused}")
    return {
        REFERENCE: until_done(eager.run),
        "graph": until_done(captured.run),
        "graph per update": until_done(per_update),
    }


def measured_rates(device: torch.device, precision: str) -> Rates:
    """By one large copy and one large product."""
    size = 8192
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    a, b = torch.randn(2, size, size, device=device, dtype=dtype)
    out = torch.empty_like(a)

    def product() -> None:
        torch.mm(a, b, out=out)
        torch.cuda.synchronize()

    def copy() -> None:
        out.copy_(a)
        torch.cuda.synchronize()

    times = in_turn({"product": product, "copy": copy}, repeats=5, seconds=0.1)
    product_s, copy_s = (float(np.median(times[name])) / 1e3 for name in ("product", "copy"))
    return Rates(bytes_per_s=2 * out.nbytes / copy_s, flop_per_s=2 * size**3 / product_s)


def floor_s(settings: OffPolicyConfig, rates: Rates, width: int) -> float:
    """Seconds [s] below which a tick's updates cannot be: `width` bytes for each number in a product.

    Counted: the forward pass of everything, twice that for what has a gradient; weights once, moments and targets once
    each way, rows of replay and activations once written and once read.
    """
    every = settings.actor_every if isinstance(settings, FastSAC | FlashSAC) else 1
    actor, critic, acts = _sizes(settings)
    batch = settings.batch_size
    # critics: own passes (3), target (1); actor: for the next actions (1), and its own update (3, and 2 of the critics)
    flop = 2 * batch * (4 * critic + actor + (3 * actor + 2 * critic) / every)
    row = 4 * (G1.actor_size + G1.critic_size) * 2 + 4 * (G1.action_size + 2)
    moved = batch * (row + 4 * width * acts) + 4 * (12 * critic + 8 * actor / every)
    return settings.updates_per_tick * max(flop / rates.flop_per_s, moved / rates.bytes_per_s)


def _sizes(settings: OffPolicyConfig) -> tuple[int, int, int]:
    """Weights of the actor and of all critics, and activations of a row in the critics."""
    inputs = G1.critic_size + G1.action_size
    if isinstance(settings, FastSAC):
        widths = (G1.actor_size, *settings.actor_hidden, 2 * G1.action_size)
        actor = sum(a * b for a, b in pairwise(widths))
        widths = (inputs, *settings.critic_hidden, settings.atoms)
        critic = sum(a * b for a, b in pairwise(widths))
        members = settings.num_critics
        return actor, members * critic, members * (sum(settings.critic_hidden) + settings.atoms)
    assert isinstance(settings, FlashSAC)
    a, c, n = settings.actor_width, settings.critic_width, settings.blocks
    actor = G1.actor_size * a + n * 8 * a**2 + a * 2 * G1.action_size
    critic = inputs * c + n * 8 * c**2 + c * settings.atoms
    return 2 * actor, 2 * 2 * critic, 2 * 2 * (n * 5 * c + settings.atoms)  # both ends of a transition in each pass


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--quick", action="store_true", help="few short repeats: shows that it runs, not how fast")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here, and this benchmark is about nothing else: nothing was measured")
        return
    device = torch.device("cuda", 0)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]
    repeats, seconds = (2, 0.05) if arguments.quick else (9, 0.5)
    described = machine()
    print(f"{described['device']}, torch {described['torch']}; milliseconds per tick; ratio: eager time / own time")
    numbers: dict[str, object] = {}
    for precision, width in [("32-true", 4), ("bf16-mixed", 2)]:
        rates = measured_rates(device, precision)
        print(f"\n{precision}: {rates.bytes_per_s / 1e9:.0f} GB/s, {rates.flop_per_s / 1e12:.1f} TFLOP/s")
        for name, settings in SIZES.items():
            own = table(f"{name}, {precision}", in_turn(ways(settings, device, precision), repeats, seconds), REFERENCE)
            floor_ms = 1e3 * floor_s(settings, rates, width)
            print(f"{'floor':24}{floor_ms:10.2f}; the graph takes {own['graph']['ms'] / floor_ms:.1f} times as long")
            numbers[f"{name}, {precision}"] = {**own, "floor": {"ms": floor_ms}}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, "sizes": numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
