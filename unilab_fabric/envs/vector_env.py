"""Reset, step, same-step autoreset and final observations: what every task of ours shares.

Gymnasium sees a `VectorEnv` (`reset`, `step`, final observations in `infos`). The collector calls `advance`, which
leaves its results in the arrays named below and makes no copies.
"""

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv
from numpy.typing import NDArray

from unilab_fabric.spaces import Metric, TaskSpec

Array = NDArray[np.float32]


class TaskEnv(VectorEnv[dict[str, Array], Array, NDArray[Any]]):
    """Base of every task; N is `num_envs`. After `reset` and after `advance` these arrays hold the newest step."""

    observation: dict[str, Array]
    """`actor` (N, a) and `critic` (N, c): what the policy sees next; after an episode's end that of the new one."""
    next_observation: dict[str, Array]
    """The same for the state the step reached: for an ended episode its true last observation."""
    reward: Array
    """(N,)"""
    terminated: NDArray[np.bool_]
    """(N,): failure; cuts the bootstrap."""
    truncated: NDArray[np.bool_]
    """(N,): time limit, and not terminated too; the value goes on."""
    metrics: tuple[Metric, ...]
    """What `totals` counts."""
    totals: NDArray[np.float64]
    """(len(metrics), 2): sum and count, added to by `advance`; whoever reads them sets them to zero."""

    def task_spec(self) -> TaskSpec:
        """Sizes, limits, metrics and mirrors, for the learner."""
        raise NotImplementedError

    def advance(self, action: Array) -> None:
        """One control step of all environments with (N, actions), same-step autoreset included."""
        raise NotImplementedError

    def get_state(self) -> dict[str, NDArray[Any]]:
        """All mutable state, as arrays that `np.load(allow_pickle=False)` reads back."""
        raise NotImplementedError

    def set_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Continues bit for bit where `get_state` was called."""
        raise NotImplementedError
