"""What a policy may be asked to do: ranges of commands."""

import math
from dataclasses import dataclass

from unilab_fabric.errors import UserError

Range = tuple[float, float]


def check_range(field: str, limits: Range) -> None:
    """Raises UserError unless the range is finite and in order."""
    if not (len(limits) == 2 and -math.inf < limits[0] <= limits[1] < math.inf):
        raise UserError(field, list(limits), "allowed: two finite numbers, the smaller first")


@dataclass(frozen=True, kw_only=True)
class VelocityCommands:
    """Ranges of a commanded velocity in the base frame, drawn at reset and kept for the episode."""

    forward: Range = (-0.6, 1.0)
    """Forward velocity [m/s]."""
    left: Range = (-0.4, 0.4)
    """Velocity to the left [m/s]."""
    turn: Range = (-0.8, 0.8)
    """Yaw rate to the left [rad/s]."""

    def __post_init__(self) -> None:
        for name, limits in vars(self).items():
            check_range(f"task.commands.{name}", limits)
