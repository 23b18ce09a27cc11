"""What observations, rewards, resets and bookkeeping cost: `advance` of Go2JoystickFlat against `Batch.step` alone.

    python benchmarks/environment.py [--json PATH]
    python benchmarks/environment.py --terrain

Physics costs what the contacts of the moment cost, so both sides step the same states under the same controls: before
each tick the reference gets a copy of the task's states, then both step once, each with the clock on it alone and in
turns first. The actions are a noisy open-loop trot, and episodes end as they do in training.

Other processes on the machine distort the comparison either way. So only undisturbed ticks count: those in which
neither side took more than 1.15 times the fastest tenth of its own; the output says how many they were.

With --terrain: what both walking tasks cost on rough ground against flat ground, under the same actions.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import mjbatch
import numpy as np
from numpy.typing import NDArray

from unilab_fabric.envs.batch import allowed_cores
from unilab_fabric.envs.robots import go2
from unilab_fabric.envs.robots.model import Physics
from unilab_fabric.envs.tasks.g1_walk import G1WalkFlat
from unilab_fabric.envs.tasks.go2_joystick import CONTROL_STEP_S, GAIT_HZ, GAIT_OFFSETS, Go2JoystickFlat
from unilab_fabric.envs.terrain import Terrain
from unilab_fabric.envs.vector_env import Array

BARS = {256: 0.93, 1024: 0.95}
TICKS = {64: 1000, 256: 600, 1024: 240}
WARM_UP_TICKS = 100
FAITHFUL_TICKS = 30  # it is slow
UNDISTURBED = 1.15
ACTION_SCALE = 0.25  # rad
TERRAIN_ENVS, TERRAIN_TICKS = 256, 200

Step = Callable[[], None]


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

    def __init__(self, task: Go2JoystickFlat, physics: Physics) -> None:
        self._batch = mjbatch.Batch(go2.load(physics), task.num_envs, num_threads=allowed_cores())
        self._state, self._ctrl = self._batch.bind("state"), self._batch.bind("ctrl")
        self._substeps = go2.PHYSICS[physics].substeps

    def set(self, task: Go2JoystickFlat, action: Array) -> None:
        """The states that the task is in and the controls that it is about to apply."""
        self._state[:] = task.sims.state
        self._ctrl[:] = np.array(go2.STAND_JOINTS) + ACTION_SCALE * action

    def step(self) -> None:
        self._batch.step(nstep=self._substeps)


def undisturbed_seconds(ticks: int, prepare: Callable[[int], tuple[Step, Step]]) -> NDArray[np.float64]:
    """(undisturbed ticks, 2): what each of two steps took, in turns first; `prepare` gives them for a tick."""
    seconds = np.zeros((ticks, 2))
    for tick in range(ticks):
        steps = list(enumerate(prepare(tick)))
        for i, step in steps if tick % 2 else reversed(steps):
            start = time.perf_counter()
            step()
            seconds[tick, i] = time.perf_counter() - start
    return seconds[(seconds < UNDISTURBED * np.quantile(seconds, 0.1, axis=0)).all(axis=1)]


def measure(num_envs: int) -> dict[str, float]:
    """Environment steps per second of the task and of bare physics, and the ratio of faithful to fast physics."""
    task = Go2JoystickFlat(num_envs, physics="fast", action_scale=ACTION_SCALE, stagger=True)
    fast, faithful = Reference(task, "fast"), Reference(task, "faithful")
    trot = Trot(num_envs, seed=0)
    task.reset(seed=0)
    for _ in range(WARM_UP_TICKS):
        task.advance(trot.action())

    def task_and_physics(tick: int) -> tuple[Step, Step]:
        action = trot.action()
        fast.set(task, action)
        return partial(task.advance, action), fast.step

    def both_physics(tick: int) -> tuple[Step, Step]:
        action = trot.action()
        task.advance(action)
        for reference in (faithful, fast):
            reference.set(task, action)
        return faithful.step, fast.step

    seconds = undisturbed_seconds(TICKS[num_envs], task_and_physics)
    task_s, physics_s = seconds.mean(axis=0)
    faithful_s, fast_s = np.median(undisturbed_seconds(FAITHFUL_TICKS, both_physics), axis=0)
    return {
        "num_envs": num_envs,
        "threads": allowed_cores(),
        "ticks": TICKS[num_envs],
        "undisturbed_ticks": len(seconds),
        "task_steps_per_s": num_envs / task_s,
        "physics_steps_per_s": num_envs / physics_s,
        "share": physics_s / task_s,
        "fast_over_faithful": faithful_s / fast_s,
    }


def measure_terrain(cls: type[Go2JoystickFlat] | type[G1WalkFlat]) -> tuple[float, float, int]:
    """Environment steps per second on flat ground and on terrain, one thread each, and the ticks that count."""
    flat, rough = (cls(TERRAIN_ENVS, terrain=terrain, stagger=True, num_threads=1) for terrain in (None, Terrain()))
    rng = np.random.default_rng(0)
    for task in (flat, rough):
        task.reset(seed=0)

    def both(tick: int) -> tuple[Step, Step]:
        action = rng.normal(0, 0.2, flat.action_space.shape or ()).clip(-1, 1).astype(np.float32)
        return partial(flat.advance, action.copy()), partial(rough.advance, action.copy())

    undisturbed_seconds(20, both)  # warm up
    seconds = undisturbed_seconds(TERRAIN_TICKS, both)
    flat_s, rough_s = seconds.mean(axis=0)
    return TERRAIN_ENVS / flat_s, TERRAIN_ENVS / rough_s, len(seconds)


def print_terrain() -> list[dict[str, object]]:
    """Prints one line per walking task; returns the figures."""
    results: list[dict[str, object]] = []
    for cls in (Go2JoystickFlat, G1WalkFlat):
        flat, rough, ticks = measure_terrain(cls)
        print(
            f"{cls.__name__}, {TERRAIN_ENVS} environments, one thread: {rough:.0f} steps/s on terrain, {flat:.0f} on "
            f"flat ground, ratio {rough / flat:.2f}, from {ticks} of {TERRAIN_TICKS} ticks"
        )
        results.append({"task": cls.__name__, "terrain_steps_per_s": rough, "flat_steps_per_s": flat})
    return results


def print_shares() -> list[dict[str, float]]:
    """Prints one line per number of environments, and whether it is within the bar; returns the figures."""
    results = [measure(num_envs) for num_envs in TICKS]
    for result in results:
        bar = BARS.get(int(result["num_envs"]))
        verdict = "" if bar is None else f" ({'reaches' if result['share'] >= bar else 'misses'} {bar})"
        print(
            f"{result['num_envs']:5} environments: task {result['task_steps_per_s']:6.0f} steps/s, its physics alone "
            f"{result['physics_steps_per_s']:6.0f}, share {result['share']:.3f}{verdict}, from "
            f"{result['undisturbed_ticks']} of {result['ticks']} ticks; "
            f"fast physics is {result['fast_over_faithful']:.1f} times as fast as faithful"
        )
    return results


def main() -> None:
    """One of the two comparisons."""
    parser = argparse.ArgumentParser(description="Go2JoystickFlat against its physics alone")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--terrain", action="store_true", help="rough ground against flat ground instead")
    options = parser.parse_args()
    results = print_terrain() if options.terrain else print_shares()
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
