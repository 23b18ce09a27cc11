"""What do storing a tick and drawing a batch cost, beside a replay of plain tensors?

    python benchmarks/replay.py [--json PATH] [--threads N] [--quick]

Go2, 256 environments, rings of 256,000 transitions, full. The reference holds each transition whole, as most replays
do: seven tensors, the next observations a second time. Ours stores every observation once, as one row with the rest,
and the true last observations of ended episodes in a ring of their own. One in 200 episodes ends in each tick.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch
from shared.timing import in_turn, machine, table

from unilab_fabric.loop.transfer import Handover
from unilab_fabric.offpolicy.replay import Replay
from unilab_fabric.spaces import TaskSpec

REFERENCE, OURS = "plain tensors", "ours"
ENVS, ACTOR, CRITIC, ACTIONS = 256, 49, 52, 12
TICKS = 1000
BATCHES = (512, 8192)
SPEC = TaskSpec(
    name="Go2JoystickFlat",
    num_envs=ENVS,
    actor_size=ACTOR,
    critic_size=CRITIC,
    action_low=(-1.0,) * ACTIONS,
    action_high=(1.0,) * ACTIONS,
    metrics=(),
    mirrors=None,
)
CPU = torch.device("cpu")


class PlainReplay:
    """Whole transitions in one tensor per field."""

    def __init__(self, capacity: int) -> None:
        sizes = {"actor": ACTOR, "critic": CRITIC, "next_actor": ACTOR, "next_critic": CRITIC, "action": ACTIONS}
        self.fields = {name: torch.zeros(capacity, size) for name, size in sizes.items()}
        self.fields |= {"reward": torch.zeros(capacity), "terminated": torch.zeros(capacity, dtype=torch.bool)}
        self._capacity, self._next = capacity, 0
        self._before = (torch.zeros(ENVS, ACTOR), torch.zeros(ENVS, CRITIC))

    def commit(self, handover: Handover) -> None:
        """Adds the transition from the observation before."""
        actor, critic = handover.actor.clone(), handover.critic.clone()
        next_actor, next_critic = actor, critic
        if len(handover.ended_env):
            next_actor, next_critic = actor.clone(), critic.clone()
            next_actor[handover.ended_env] = handover.final_actor
            next_critic[handover.ended_env] = handover.final_critic
        new = (*self._before, next_actor, next_critic, handover.action, handover.reward, handover.terminated)
        rows = slice(self._next, self._next + ENVS)
        for field, values in zip(self.fields.values(), new, strict=True):
            field[rows] = values
        self._before = (actor, critic)
        self._next = (self._next + ENVS) % self._capacity

    def sample(self, batch_size: int) -> list[torch.Tensor]:
        """Transitions drawn uniformly with replacement."""
        rows = torch.randint(self._capacity, (batch_size,))
        return [field[rows] for field in self.fields.values()]


def handovers(count: int) -> list[Handover]:
    """Ticks of random values."""
    torch.manual_seed(0)
    found = []
    for _ in range(count):
        ended = (torch.rand(ENVS) < 1 / 200).nonzero().flatten()
        found.append(
            Handover(
                action=torch.randn(ENVS, ACTIONS),
                actor=torch.randn(ENVS, ACTOR),
                critic=torch.randn(ENVS, CRITIC),
                reward=torch.randn(ENVS),
                terminated=torch.zeros(ENVS, dtype=torch.bool),
                ended_env=ended,
                final_actor=torch.randn(len(ended), ACTOR),
                final_critic=torch.randn(len(ended), CRITIC),
            )
        )
    return found


def filled(ticks: int) -> tuple[Replay, PlainReplay, list[Handover]]:
    """Both rings, full."""
    given = handovers(64)
    ours = Replay(SPEC, ticks=ticks, n_step=1, discount=0.97, device=CPU, seed=1)
    plain = PlainReplay(ticks * ENVS)
    ours.begin(0, given[0])
    for tick in range(ticks + 1):
        ours.commit(given[tick % len(given)])
        plain.commit(given[tick % len(given)])
    return ours, plain, given


def measure(ticks: int, repeats: int, seconds: float) -> dict[str, dict[str, dict[str, float]]]:
    """Prints and returns a table for storing and for each size of a batch."""
    ours, plain, given = filled(ticks)

    def commits(replay: Replay | PlainReplay) -> Callable[[], None]:
        def call() -> None:
            for handover in given[:8]:
                replay.commit(handover)

        return call

    def samples(replay: Replay | PlainReplay, batch_size: int) -> Callable[[], None]:
        def call() -> None:
            replay.sample(batch_size)

        return call

    times = in_turn({REFERENCE: commits(plain), OURS: commits(ours)}, repeats, seconds)
    numbers = {"commit": table("storing eight ticks", times, REFERENCE)}
    for batch_size in BATCHES:
        times = in_turn({REFERENCE: samples(plain, batch_size), OURS: samples(ours, batch_size)}, repeats, seconds)
        numbers[f"sample {batch_size}"] = table(f"drawing {batch_size:,} transitions", times, REFERENCE)
    held = {REFERENCE: sum(f.nbytes for f in plain.fields.values()), OURS: sum(t.nbytes for t in ours.tensors())}
    print(f"memory: {', '.join(f'{name} {size / 1e6:.0f} MB' for name, size in held.items())}")
    return numbers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads to compute with")
    parser.add_argument("--quick", action="store_true", help="small rings, short repeats: shows that it runs")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    described = machine()
    print(f"{described['processor']}, {described['threads']} threads, torch {described['torch']}")
    numbers = measure(*((20, 2, 0.02) if arguments.quick else (TICKS, 9, 0.3)))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, **numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
