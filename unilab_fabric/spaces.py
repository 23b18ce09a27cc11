"""What a task tells the learner about itself; plain numbers, so that it can cross a process boundary as JSON."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A figure that an environment reports as sum and count."""

    name: str
    """Tag in the logs, for example Train/mean_reward or Episode/lin_vel_z."""
    kind: Literal["mean", "total"] = "mean"
    """mean is sum over count of the report's interval; total is the sum since the start of the run."""


@dataclass(frozen=True, kw_only=True)
class Mirror:
    """A reflection of one vector: entry i of the mirror image is sign[i] * x[index[i]]."""

    index: tuple[int, ...]
    sign: tuple[float, ...]


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """Sizes, action limits and names of a task."""

    name: str
    num_envs: int
    actor_size: int
    critic_size: int
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    metrics: tuple[Metric, ...]
    mirrors: dict[Literal["actor", "critic", "action"], Mirror] | None = None
    """Left-right reflection of each vector, where the task has that symmetry."""

    @property
    def action_size(self) -> int:
        """Actions of one environment."""
        return len(self.action_low)
