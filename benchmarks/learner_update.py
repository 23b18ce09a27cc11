"""How fast is one critic and actor update of each learner on this CPU, against plain eager PyTorch?

The references are what one writes first (shared/plain_fast_sac.py, shared/plain_flash_sac.py): float32, a module per
layer and critic, an optimiser over the list of parameters. They do the same work as the learners. Each repeat measures
the reference and every variant one after the other, in turn; the table shows medians, and ratios are medians of the
ratios within a repeat.

    python benchmarks/learner_update.py [--json PATH] [--threads N] [--quick]
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from shared.plain_fast_sac import PlainFastSAC
from shared.plain_flash_sac import PlainFlashSAC
from shared.timing import in_turn, machine, table

from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.learner import Batch
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

CPU = torch.device("cpu")
REFERENCE = "plain eager float32"


@dataclass(frozen=True)
class Robot:
    """Sizes of a task."""

    name: str
    actor: int
    critic: int
    actions: int

    def spec(self) -> TaskSpec:
        return TaskSpec(
            name=self.name,
            num_envs=1024,
            actor_size=self.actor,
            critic_size=self.critic,
            action_low=(-1.0,) * self.actions,
            action_high=(1.0,) * self.actions,
            metrics=(),
        )

    def batch(self, rows: int) -> Batch:
        return Batch(
            actor=torch.randn(rows, self.actor),
            critic=torch.randn(rows, self.critic),
            action=torch.rand(rows, self.actions) * 2 - 1,
            reward=torch.randn(rows),
            next_actor=torch.randn(rows, self.actor),
            next_critic=torch.randn(rows, self.critic),
            terminated=torch.rand(rows) < 0.01,
            discount=torch.full((rows,), 0.97),
        )


GO2, G1 = Robot("Go2", 49, 52, 12), Robot("G1", 98, 101, 29)


@dataclass(frozen=True)
class Size:
    """A learner's settings on a task."""

    name: str
    robot: Robot
    settings: FastSAC | FlashSAC


def _fast(batch: int, actor: tuple[int, ...], critic: tuple[int, ...]) -> FastSAC:
    return FastSAC(
        batch_size=batch, actor_hidden=actor, critic_hidden=critic, actor_every=1, normalize_observations=False
    )


def _flash(batch: int, actor: int, critic: int, blocks: int) -> FlashSAC:
    return FlashSAC(batch_size=batch, actor_width=actor, critic_width=critic, blocks=blocks, actor_every=1)


PRODUCTION = ((512, 256, 128), (768, 384, 192))
SIZES = [
    Size("FastSAC, G1, batch 512", G1, _fast(512, *PRODUCTION)),
    Size("FastSAC, G1, batch 8192", G1, _fast(8192, *PRODUCTION)),
    Size("FastSAC, Go2 preset, batch 512", GO2, _fast(512, (256, 128, 64), (256, 128, 64))),
    Size("FlashSAC, G1, batch 2048", G1, _flash(2048, 128, 256, 2)),
    Size("FlashSAC, Go2 preset, batch 512", GO2, _flash(512, 64, 96, 1)),
]


def updates(size: Size) -> dict[str, Callable[[], None]]:
    """One update of the reference and of each variant, by name."""
    settings, spec = size.settings, size.robot.spec()
    batch = size.robot.batch(settings.batch_size)
    reference: PlainFastSAC | PlainFlashSAC
    variants: Mapping[str, tuple[str, FastSAC | FlashSAC]] = {
        "float32": ("32-true", settings),
        "bf16": ("bf16-mixed", settings),
    }
    if isinstance(settings, FastSAC):
        reference = PlainFastSAC(spec, settings)
        off = FastSAC(**{**settings.__dict__, "kernels": "off"})
        variants = {**variants, "float32, kernels off": ("32-true", off), "bf16, kernels off": ("bf16-mixed", off)}
    else:
        reference = PlainFlashSAC(spec, settings, reward_scale=1.0)
    result: dict[str, Callable[[], None]] = {REFERENCE: lambda: reference.update(batch)}
    for name, (precision, own) in variants.items():
        learner = own.build(spec, CPU, precision, Ranks(), 1, 1_000_000)
        learner.observe(torch.ones(spec.num_envs), torch.zeros(0, dtype=torch.int64))
        result[name] = lambda learner=learner: learner.update(batch, 1)  # type: ignore[misc]
    return result


def measure(size: Size, repeats: int, seconds: float) -> dict[str, dict[str, float]]:
    """Prints and returns the table of one size."""
    return table(f"{size.name}", in_turn(updates(size), repeats, seconds), REFERENCE)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads to compute with")
    parser.add_argument("--quick", action="store_true", help="few short repeats: shows that it runs, not how fast")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    repeats, seconds = (2, 0.05) if arguments.quick else (9, 0.5)
    described = machine()
    print(f"{described['processor']}, {described['threads']} threads, torch {described['torch']}")
    print("one critic (with temperature and target) and one actor update; ratio: reference time / own time")
    numbers = {size.name: measure(size, repeats, seconds) for size in SIZES}
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({**described, "sizes": numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
