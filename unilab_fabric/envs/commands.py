"""What the policy is asked to do."""

import math
from collections.abc import Sequence

import numpy as np

from unilab_fabric.envs.vector_env import Floats
from unilab_fabric.errors import UserError

Range = tuple[float, float]


def check_range(field: str, limits: Range) -> None:
    """Raises UserError unless the range is finite and in order."""
    if not (len(limits) == 2 and -math.inf < limits[0] <= limits[1] < math.inf):
        raise UserError(field, list(limits), "allowed: two finite numbers, the smaller first")


def velocity_command(rng: np.random.Generator, n: int, ranges: Sequence[Range]) -> Floats:
    """Commands (3, n) from uniform ranges: forward and left [m/s] in the base frame, turning left [rad/s]."""
    low, high = np.array(ranges).T[:, :, None]
    return rng.uniform(low, high, (len(ranges), n))
