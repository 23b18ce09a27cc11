"""`run_summary.json`: how a run went, in a form that programs read."""

import json
import os
import platform
import time
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from typing_extensions import override

from unilab_fabric.evaluations import best_evaluation
from unilab_fabric.hooks.hook import Hook, RankFigures, Run

SUMMARY = "run_summary.json"
_PACKAGES = ("unilab-fabric", "torch", "lightning", "mujoco", "mjbatch", "numpy")


class Summary(Hook):
    """Keeps the figures of the run and writes them at its end; a run that is killed has none."""

    def __init__(self, topology: Mapping[str, Any], seed: int, started_at: float) -> None:
        """`topology` as plain values; `started_at` is the time [s since the epoch] at which the command started."""
        self._fixed = {
            "world_size": topology["world_size"],
            "topology": dict(topology),
            "seed": seed,
            "seeds": [seed + rank for rank in range(topology["world_size"])],
            "versions": {"python": platform.python_version()} | {name: version(name) for name in _PACKAGES},
        }
        self._started_at = started_at
        self._metrics: dict[str, float] = {}
        self._ranks = [RankFigures(seconds=0.0, env_steps=0, updates=0, phase_s={})] * topology["world_size"]

    @override
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._metrics |= metrics
        self._ranks = [_add(done, new) for done, new in zip(self._ranks, run.rank_figures, strict=True)]

    @override
    def on_end(self, run: Run, status: str) -> None:
        write_summary(run.folder, self.figures(run, status))

    def figures(self, run: Run, status: str) -> dict[str, Any]:
        """What the file holds. Rates are means over the whole loop, checkpoints included; the rest is the newest."""
        ranks: list[dict[str, Any]] = [
            {
                "rank": rank,
                "env_steps": one.env_steps,
                "env_steps_per_sec": one.env_steps / one.seconds if one.seconds else 0.0,
                "updates": one.updates,
                "seconds": dict(one.phase_s),
            }
            for rank, one in enumerate(self._ranks)
        ]
        return {
            "status": status,
            "reason": run.stop_reason,
            "env_steps": run.env_steps,
            "env_steps_per_sec": sum(rank["env_steps_per_sec"] for rank in ranks),
            "ticks": run.tick,
            "mean_reward": self._metrics.get("Train/mean_reward"),
            "mean_episode_length": self._metrics.get("Train/mean_episode_length"),
            "skipped_updates": run.skipped_updates,
            "first_tick_s": run.first_tick_at and run.first_tick_at - self._started_at,
            "wall_s": time.time() - self._started_at,
            "ranks": ranks,
            "best_evaluation": best_evaluation(run.folder),
            "metrics": self._metrics,
        } | self._fixed


def _add(done: RankFigures, new: RankFigures) -> RankFigures:
    return RankFigures(
        seconds=done.seconds + new.seconds,
        env_steps=done.env_steps + new.env_steps,
        updates=done.updates + new.updates,
        phase_s={phase: done.phase_s.get(phase, 0.0) + seconds for phase, seconds in new.phase_s.items()},
    )


def write_summary(folder: Path, figures: Mapping[str, Any]) -> None:
    """Writes the file whole or not at all."""
    part = folder / (SUMMARY + ".partial")
    part.write_text(json.dumps(figures, indent=2) + "\n")
    os.replace(part, folder / SUMMARY)
