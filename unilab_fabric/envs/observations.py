"""Observation terms beyond what the state holds itself: gait phase and sensor noise."""

from collections.abc import Sequence

import numpy as np

from unilab_fabric.envs.vector_env import Array, Floats


def gait_phase(clock: Floats, offsets: Sequence[float]) -> Floats:
    """Phase of each foot in [0, 1): clock (n,) in cycles, one offset per foot; returns (feet, n)."""
    cycles: Floats = clock.astype(np.float32) + np.array(offsets, np.float32)[:, None]
    return cycles - np.floor(cycles)


def advance_phase(phase: Floats, step: float) -> None:
    """Moves phases in [0, 1) on by a part of a cycle, in place."""
    phase += np.float32(step)
    phase -= np.floor(phase)


def uniform_noise(rng: np.random.Generator, rows: Array, half_width: Array) -> Array:
    """Rows (n, k) with noise from U[-w, w], new for each entry; half_width (k,) in the entries' units."""
    noise = rng.random(rows.shape, dtype=np.float32)
    noise *= 2 * half_width
    noise -= half_width
    noise += rows
    return noise
