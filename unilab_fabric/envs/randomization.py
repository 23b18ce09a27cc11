"""Randomisation terms: pure functions from a generator and ranges to one value per environment (or part of it)."""

import numpy as np
from numpy.typing import NDArray

from unilab_fabric.envs.commands import Range

Values = NDArray[np.float64]


def servo_gain(rng: np.random.Generator, shape: tuple[int, int], gain: Range) -> Values:
    """One gain, stiffness [N m/rad] or damping [N m s/rad], of each servo of each environment; shape (n, servos)."""
    return rng.uniform(*gain, shape)


def body_mass(rng: np.random.Generator, n: int, nominal: float, added: Range) -> Values:
    """Mass of a body (n,) with a load on it [kg]; the inertia stays."""
    return nominal + rng.uniform(*added, n)


def body_com_x(rng: np.random.Generator, n: int, nominal: float, shift: Range) -> Values:
    """Centre of mass of a body along x (n,) [m]."""
    return nominal + rng.uniform(*shift, n)


def sliding_friction(rng: np.random.Generator, n: int, friction: Range) -> Values:
    """Coefficient of sliding friction (n,), the same under all feet of an environment."""
    return rng.uniform(*friction, n)


def is_pushed(rng: np.random.Generator, n: int, control_step_s: float, interval_s: float) -> NDArray[np.bool_]:
    """Where a push falls into this control step (n,): each environment by itself, every `interval_s` on average."""
    return rng.random(n) < control_step_s / interval_s


def push_velocity(rng: np.random.Generator, n: int, planar: float, vertical: float) -> Values:
    """What a push adds to the base's velocity (n, 3) [m/s], world frame: U[-planar, planar] twice, then vertical."""
    reach = np.array([planar, planar, vertical])
    return rng.uniform(-reach, reach, (n, 3))
