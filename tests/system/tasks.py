"""Tasks for tests of whole jobs: they stand still at a chosen moment, or fail there.

At its moment the task leaves a file in the working folder and sleeps, so that a test has time to act within it.
"""

import os
import time
from pathlib import Path
from typing import Literal

import numpy as np

from unilab_fabric.envs.tasks.cartpole import CartpoleSwingup

Moment = Literal["", "starting", "first step", "saving", "last step"]


def mark(moment, rank):
    """The file that says that this rank's environments have reached the moment."""
    return Path(f"reached {moment}, rank {rank}")


class Held(CartpoleSwingup):
    """Stands still for `hold_s` seconds at one moment."""

    def __init__(
        self,
        num_envs: int = 8,
        *,
        hold: Moment = "",
        hold_s: float = 2.0,
        last_step: int = 0,
        num_threads: int = 0,
        seed: int = 0,
    ) -> None:
        """Makes the environments.

        Args:
            num_envs: Environments per rank; with one of them, the preflight's, nothing is held.
            hold: The moment.
            hold_s: How long [s].
            last_step: Steps of the whole run.
            num_threads: Physics threads.
            seed: 1 plus the rank.
        """
        super().__init__(num_envs, num_threads=num_threads, seed=seed)
        self._hold = hold if num_envs > 1 else ""
        self._hold_s = hold_s
        self._rank = seed - 1
        self._steps = 0
        self._last_step = last_step
        self._reached("starting")

    def advance(self, action):
        self._steps += 1
        if self._steps == 1:
            self._reached("first step")
        if self._steps == self._last_step:
            self._reached("last step")
        super().advance(action)

    def get_state(self):
        self._reached("saving")
        return super().get_state()

    def _reached(self, moment):
        if moment == self._hold:
            mark(moment, self._rank).touch()
            time.sleep(self._hold_s)


class Failing(CartpoleSwingup):
    """Raises on one rank, at one place."""

    def __init__(
        self,
        num_envs: int = 8,
        *,
        fail: Literal["start", "step", "reward", "segfault"] = "step",
        fail_rank: int = 0,
        num_threads: int = 0,
        seed: int = 0,
    ) -> None:
        """Makes the environments.

        Args:
            num_envs: Environments per rank; with one of them, the preflight's, nothing fails.
            fail: The place.
            fail_rank: The rank.
            num_threads: Physics threads.
            seed: 1 plus the rank.
        """
        super().__init__(num_envs, num_threads=num_threads, seed=seed)
        self._fail = fail if num_envs > 1 and seed - 1 == fail_rank else ""
        self._steps = 0
        if self._fail == "start":
            raise RuntimeError("no start today")

    def advance(self, action):
        self._steps += 1
        if self._steps == 30 and self._fail == "step":
            raise RuntimeError("no step today")
        if self._steps == 30 and self._fail == "segfault":
            os.abort()
        super().advance(action)

    def _evaluate(self):
        super()._evaluate()
        if self._steps == 30 and self._fail == "reward":
            raise ZeroDivisionError("no reward today")


class Poisoned(CartpoleSwingup):
    """Gives values that are not finite on one rank."""

    def __init__(
        self,
        num_envs: int = 8,
        *,
        poison: Literal["", "actor", "critic", "reward"] = "",
        poison_rank: int = 1,
        num_threads: int = 0,
        seed: int = 0,
    ) -> None:
        """Makes the environments.

        Args:
            num_envs: Environments per rank.
            poison: What is not finite in environment 3 at step 30.
            poison_rank: The rank.
            num_threads: Physics threads.
            seed: 1 plus the rank.
        """
        super().__init__(num_envs, num_threads=num_threads, seed=seed)
        self._poison = poison if seed - 1 == poison_rank else ""
        self._steps = 0

    def advance(self, action):
        self._steps += 1
        super().advance(action)

    def _evaluate(self):
        super()._evaluate()
        if self._steps == 30 and self._poison == "reward":
            self.terms[0, 3] = np.nan

    def _observe(self, ids, actor, critic):
        super()._observe(ids, actor, critic)
        if self._steps == 30 and isinstance(ids, slice) and self._poison in ("actor", "critic"):
            {"actor": actor, "critic": critic}[self._poison][3, 0] = np.inf


class Pushed(CartpoleSwingup):
    """Rewards the push itself: an action's worth is known beforehand."""

    def advance(self, action):
        self._push = action[:, 0].copy()
        super().advance(action)

    def _evaluate(self):
        super()._evaluate()
        self.terms[0], self.terms[1] = self._push, 0.0
