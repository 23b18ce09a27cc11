"""What the ranks tell each other every `training.log_every` ticks: metrics and times.

One gather of one vector of numbers for each rank, whose layout is fixed before the first tick. All ranks compute the
same figures from it, so all of them take the same decisions.
"""

import time
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unilab_fabric.hooks.hook import RankFigures
from unilab_fabric.learners.learner import Replicated
from unilab_fabric.loop.phases import COLLECTOR_PHASES, PHASES
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import Metric


@dataclass(frozen=True, kw_only=True)
class Report:
    """The figures of one interval, the same on every rank."""

    metrics: dict[str, float]
    """By tag, of the job; what nobody counted is absent."""
    rank_figures: list[RankFigures]
    """By rank."""


class Reporter:
    """Adds up one rank's figures and merges them over ranks."""

    def __init__(self, env_metrics: tuple[Metric, ...], learner: Replicated, ranks: Ranks) -> None:
        self._env_metrics = env_metrics
        self._learner = learner
        self._ranks = ranks
        self.totals: NDArray[np.float64] = np.zeros((len(env_metrics), 2))
        """Sum and count of this rank's environments since the last report."""
        self.since_start: NDArray[np.float64] = np.zeros(len(env_metrics))
        """Sums of the job up to the last report; the figures of kind `total`."""
        self.phases = tuple(phase for phase in PHASES if phase != "all_reduce" or not ranks.on_cuda)
        """Those of `PHASES` that can be told here."""
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        self.all_updates = 0
        """Updates of this process."""
        self._env_steps = 0
        self._updates = 0
        self._ticks = 0
        self._since = time.perf_counter()

    def count_phase(self, phase: str, seconds: float, between_ranks_s: float) -> None:
        """Adds seconds [s] to a phase of the learner, those in collectives to `all_reduce`."""
        self._phase_s[phase] += seconds - between_ranks_s
        self._phase_s["all_reduce"] += between_ranks_s

    def count_collector(self, seconds: NDArray[np.float64]) -> None:
        """Adds a tick of the collector: seconds [s] of each of `COLLECTOR_PHASES`."""
        for phase, more in zip(COLLECTOR_PHASES, seconds, strict=True):
            self._phase_s[phase] += float(more)

    def count_tick(self, env_steps: int, updates: int) -> None:
        """Counts one tick of this rank."""
        self._ticks += 1
        self._env_steps += env_steps
        self.count_updates(updates)

    def count_updates(self, updates: int) -> None:
        """Counts updates, where they belong to several ticks."""
        self._updates += updates
        self.all_updates += updates

    def start_clock(self) -> None:
        """Starts the first interval."""
        self._since = time.perf_counter()

    def report(self) -> Report:
        """Merges the interval over ranks and starts the next one; every rank must call it at the same tick."""
        seconds = time.perf_counter() - self._since
        own = np.concatenate(
            [
                self.totals.ravel(),
                [seconds, self._ticks, self._env_steps, self._updates],
                [self._phase_s[phase] for phase in self.phases],
            ]
        )
        learner = self._learner.metrics
        vector = torch.cat([torch.from_numpy(own).to(learner.device), learner.flatten()])
        rows = self._ranks.gather(vector, "report").cpu().numpy()
        learner.zero_()
        self.totals[:] = 0.0
        self._phase_s = dict.fromkeys(PHASES, 0.0)
        self._ticks = self._env_steps = self._updates = 0
        self._since = time.perf_counter()
        return self._merge(rows)

    def _merge(self, rows: NDArray[np.float64]) -> Report:
        ranks = len(rows)
        env_size = 2 * len(self._env_metrics)
        env, rest = rows[:, :env_size].reshape(ranks, -1, 2).sum(0), rows[:, env_size:]
        learner = rest[:, 4 + len(self.phases) :].reshape(ranks, -1, 2).sum(0)
        self.since_start += env[:, 0]
        metrics = {
            metric.name: float(total if metric.kind == "total" else pair[0] / pair[1])
            for metric, pair, total in zip(self._env_metrics, env, self.since_start, strict=True)
            if metric.kind == "total" or pair[1] > 0
        }
        metrics |= {
            name: float(pair[0] / pair[1])
            for name, pair in zip(self._learner.metric_names, learner, strict=True)
            if pair[1] > 0
        }
        figures = [
            RankFigures(
                seconds=float(row[0]),
                env_steps=int(row[2]),
                updates=int(row[3]),
                phase_s=dict(zip(self.phases, row[4 : 4 + len(self.phases)].tolist(), strict=True)),
            )
            for row in rest
        ]
        metrics["Perf/env_steps_per_sec"] = float((rest[:, 2] / rest[:, 0]).sum())
        metrics["Perf/updates_per_sec"] = float((rest[:, 3] / rest[:, 0]).sum())
        for phase in self.phases:  # of the slowest rank
            metrics[f"Perf/{phase}_ms"] = max(
                1e3 * one.phase_s[phase] / max(int(row[1]), 1) for one, row in zip(figures, rest, strict=True)
            )
        return Report(metrics=metrics, rank_figures=figures)


def tensor_of(values: NDArray[np.float64]) -> Tensor:
    """A copy of an array as a tensor, for a checkpoint."""
    return torch.from_numpy(values.copy())
