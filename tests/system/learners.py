"""Learners and trackers for tests of whole jobs, which fail or poison themselves on one rank."""

import time
from dataclasses import dataclass
from typing import Literal

import torch
from lightning.fabric.loggers.logger import Logger

from unilab_fabric.learners.fast_sac.config import FastSAC

AT_UPDATE = 200


@dataclass(frozen=True, kw_only=True)
class Faulty(FastSAC):
    """FastSAC with one fault, at update 200 of rank 1."""

    fault: Literal["", "update", "gradient", "parameter", "every gradient", "bit", "action", "slow build"] = ""
    """Raise; make a gradient or a parameter not finite; do so at every update from there; flip a bit of a parameter;
    give environment 3 an action that is not finite, once; take seven seconds to build."""

    def build(self, spec, device, precision, ranks, seed, total_updates):
        if self.fault == "slow build" and ranks.rank == 1:
            time.sleep(7)
        learner = super().build(spec, device, precision, ranks, seed, total_updates)
        if ranks.rank == 1:
            _inject(learner, self.fault)
        return learner


def _inject(learner, fault):
    update, critic = learner.update, learner.critic_flat
    mark = learner.skipped.mark

    def faulty_update(batch, index):
        if index == AT_UPDATE and fault == "update":
            raise RuntimeError("no update today")
        if index == AT_UPDATE and fault == "parameter":
            critic.values[0] = torch.nan
        if index == AT_UPDATE and fault == "bit":
            critic.values.view(torch.int32)[5] ^= 1
        update(batch, index)

    def faulty_mark(marks, reduced):
        now = int(learner._updates) if marks is learner._critic_marks else -1
        if (now == AT_UPDATE and fault == "gradient") or (now >= AT_UPDATE and fault == "every gradient"):
            reduced[7] = torch.inf
        mark(marks, reduced)

    act = learner.act

    def faulty_act(observation):
        action = act(observation)
        if fault == "action" and int(learner._updates) == AT_UPDATE:
            action[3] = torch.nan
        return action

    learner.act = faulty_act
    learner.update = faulty_update
    learner.skipped.mark = faulty_mark


class CountingLogger(Logger):
    """Adds a line to a file for each opening; can be slow, or fail."""

    def __init__(self, count_file: str = "openings", start_s: float = 0.0, fail_at: int = 0) -> None:
        """Opens.

        Args:
            count_file: The file.
            start_s: Seconds that opening takes.
            fail_at: The report at which it raises; 0 for none.
        """
        with open(count_file, "a") as file:
            file.write("opened\n")
        time.sleep(start_s)
        self._fail_at = fail_at
        self._reports = 0

    name = "counting"
    version = 0

    def log_metrics(self, metrics, step=None):
        self._reports += 1
        if self._reports == self._fail_at:
            raise ConnectionError("no report today")

    def log_hyperparams(self, *args, **kwargs):
        pass


@dataclass(frozen=True, kw_only=True)
class Collapsing(FastSAC):
    """FastSAC whose policy is made to be one thing: better with every update, up to the one of its collapse."""

    collapse_at: int = 60
    """Update at which the policy becomes the worst there is."""

    def build(self, spec, device, precision, ranks, seed, total_updates):
        learner = super().build(spec, device, precision, ranks, seed, total_updates)
        head, update = learner.actor.net.head, learner.update

        def made_up(batch, index):
            update(batch, index)
            updates = int(learner._updates)
            with torch.no_grad():
                head.weight.zero_()
                head.bias.zero_()
                head.bias[..., 0] = updates / self.collapse_at if updates <= self.collapse_at else -3.0

        learner.update = made_up
        return learner
