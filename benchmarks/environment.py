"""What observations, rewards, resets and bookkeeping cost: `advance` of Go2JoystickFlat against `Batch.step` alone.

    python benchmarks/environment.py [--json PATH]

Physics costs what the contacts of the moment cost, so both sides step the same states under the same controls: before
each tick the reference gets a copy of the task's states, then both step once, each with the clock on it alone. The
actions are a noisy open-loop trot, and episodes end as they do in training. Figures are medians over rounds; the ratio
of two physics is taken in the same way.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mjbatch
import numpy as np

from unilab_fabric.envs.batch import allowed_cores
from unilab_fabric.envs.robots import go2
from unilab_fabric.envs.tasks.go2_joystick import CONTROL_STEP_S, GAIT_HZ, GAIT_OFFSETS, Go2JoystickFlat
from unilab_fabric.envs.vector_env import Array

BARS = {256: 0.93, 1024: 0.95}
WARM_UP_TICKS = 100
TICKS = 40
FAITHFUL_EVERY = 5  # it is slow
ROUNDS = 9


class Trot:
    """Lifts the diagonal pairs of legs in turn, with noise; (N, 12) actions."""

    def __init__(self, num_envs: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._phase = self._rng.random((num_envs, 1)) + GAIT_OFFSETS.T
        self._tick = 0

    def action(self) -> Array:
        self._tick += 1
        lift = np.sin(2 * np.pi * (self._phase + self._tick * CONTROL_STEP_S * GAIT_HZ)).clip(0)
        legs = lift[:, :, None] * np.array([0.0, 0.8, -1.6])
        noisy = legs.reshape(len(lift), 12) + self._rng.normal(0, 0.2, (len(lift), 12))
        return np.asarray(noisy.clip(-1, 1), np.float32)


class Reference:
    """`mjbatch.Batch` on the task's model, and nothing else."""

    def __init__(self, task: Go2JoystickFlat, physics: go2.Physics) -> None:
        self._batch = mjbatch.Batch(go2.load(physics), task.num_envs, num_threads=allowed_cores())
        self._state, self._ctrl = self._batch.bind("state"), self._batch.bind("ctrl")
        self._substeps = go2.PHYSICS[physics].substeps

    def set(self, task: Go2JoystickFlat, action: Array) -> None:
        """The states that the task is in and the controls that it is about to apply."""
        self._state[:] = task.sims.state
        self._ctrl[:] = np.array(go2.STAND_JOINTS) + 0.25 * action

    def step(self) -> None:
        self._batch.step(nstep=self._substeps)


def measure(num_envs: int) -> dict[str, float]:
    """Environment steps per second of the task and of bare physics, fast and faithful, and their ratios."""
    task = Go2JoystickFlat(num_envs, physics="fast", action_scale=0.25, stagger=True)
    fast, faithful = Reference(task, "fast"), Reference(task, "faithful")
    trot = Trot(num_envs, seed=0)
    task.reset(seed=0)
    for _ in range(WARM_UP_TICKS):
        task.advance(trot.action())
    rounds = [_one_round(task, trot, fast, faithful) for _ in range(ROUNDS)]
    task_s, fast_s, faithful_s = (statistics.median(column) for column in zip(*rounds, strict=True))
    steps = num_envs * TICKS
    return {
        "num_envs": num_envs,
        "threads": allowed_cores(),
        "task_steps_per_s": steps / task_s,
        "physics_steps_per_s": steps / fast_s,
        "share": statistics.median(fast / task for task, fast, _ in rounds),
        "faithful_physics_steps_per_s": steps / faithful_s,
        "fast_over_faithful": statistics.median(faithful / fast for _, fast, faithful in rounds),
    }


def _one_round(task: Go2JoystickFlat, trot: Trot, fast: Reference, faithful: Reference) -> tuple[float, float, float]:
    """Seconds for TICKS ticks of the task, of its physics alone, and of the faithful physics."""
    seconds = [0.0, 0.0, 0.0]
    for tick in range(TICKS):
        action = trot.action()
        references = (fast, faithful) if tick % FAITHFUL_EVERY == 0 else (fast,)
        for reference in references:
            reference.set(task, action)
        steps: list[Callable[[], None]] = [partial(task.advance, action), *(r.step for r in references)]
        turns = list(enumerate(steps))
        for i, step in turns if tick % 2 else reversed(turns):  # who comes second finds the caches warm
            start = time.perf_counter()
            step()
            seconds[i] += time.perf_counter() - start
    return seconds[0], seconds[1], seconds[2] * FAITHFUL_EVERY


def main() -> None:
    """Prints one line per number of environments, and whether it is within the bar."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    results = [measure(num_envs) for num_envs in (64, 256, 1024)]
    for result in results:
        bar = BARS.get(int(result["num_envs"]))
        verdict = "" if bar is None else f" ({'reaches' if result['share'] >= bar else 'misses'} {bar})"
        print(
            f"{result['num_envs']:5} environments: task {result['task_steps_per_s']:8.0f} steps/s, "
            f"its physics alone {result['physics_steps_per_s']:8.0f}, share {result['share']:.3f}{verdict}; "
            f"faithful physics {result['faithful_physics_steps_per_s']:7.0f}, "
            f"fast is {result['fast_over_faithful']:.1f} times as fast"
        )
    path = parser.parse_args().json
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
