"""Observation terms beyond what the state holds itself: gait phase and sensor noise."""

import numpy as np

from unilab_fabric.envs.vector_env import Array


def gait_phase(clock: Array, offsets: Array) -> Array:
    """Phase of each foot in [0, 1): clock (n,) in cycles, offsets (feet, 1); returns (feet, n)."""
    cycles: Array = clock + offsets
    cycles -= np.floor(cycles)
    return cycles


def advance_phase(phase: Array, step: float) -> None:
    """Moves phases in [0, 1) on by a part of a cycle, in place."""
    phase += step
    phase -= np.floor(phase)


def uniform_noise(rng: np.random.Generator, rows: Array, half_width: Array) -> Array:
    """Rows (n, k) with noise from U[-w, w], new for each entry; half_width (k,) in the entries' units."""
    noise = rng.random(rows.shape, dtype=np.float32)
    noise *= 2 * half_width
    noise -= half_width
    noise += rows
    return noise
