"""The report as a picture; matplotlib is not among what a training needs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unilab_fabric.errors import UserError
from unilab_fabric.reporting.runs import RETURN, FinishedRun

_COLOURS = {
    "physics": "#4c78a8",
    "wait": "#dcdcdc",
    "collector_wait": "#dcdcdc",
    "commit": "#b279a2",
    "act": "#72b7b2",
    "rewards": "#9ecae9",
    "copy": "#d67195",
    "all_reduce": "#e45756",
    "update": "#f58518",
    "other": "#8c8c8c",
}
_BARS = 12
"""Ranks that get bars, the first of each run: with more nobody could read them."""


def require_matplotlib() -> None:
    """Raises UserError where it is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        needed = "it needs matplotlib: pip install 'unilab-fabric[report]'"
        raise UserError("png", "not possible here", needed) from None


def draw(runs: Sequence[FinishedRun], file: Path) -> None:
    """Return over steps and over seconds, and the phases of a tick on each rank. Raises UserError."""
    from matplotlib.figure import Figure

    bars = [(run, rank) for run in runs for rank in run.ranks[: max(1, _BARS // len(runs))]]
    figure = Figure(figsize=(11, 3.6 + 0.55 * len(bars) + 0.8), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=[3.6, 0.55 * len(bars) + 0.8])
    above, below = parts
    _draw_returns(above.subplots(1, 2, sharey=True), runs)
    _draw_ticks(below.subplots(), bars, several=len(runs) > 1)
    try:
        figure.savefig(file, dpi=120)
    except (ValueError, OSError) as error:
        raise UserError("png", file, f"it cannot be written: {error}") from None


def _draw_returns(axes: Any, runs: Sequence[FinishedRun]) -> None:
    over_steps, over_seconds = axes
    for run in runs:
        points = [
            (steps / 1e6, seconds, row[RETURN])
            for steps, seconds, row in zip(run.curves.env_steps, run.curves.seconds, run.curves.values, strict=True)
            if RETURN in row
        ]
        steps, seconds, returns = zip(*points, strict=True) if points else ((), (), ())
        label = f"{run.name} ({run.world_size} rank{'s' if run.world_size > 1 else ''})"
        over_steps.plot(steps, returns, label=label, linewidth=1.4)
        over_seconds.plot(seconds, returns, label=label, linewidth=1.4)
    over_steps.set(xlabel="environment steps [million]", ylabel="return of episodes that ended")
    over_seconds.set(xlabel="training seconds [s]")
    for axis in axes:
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    if any(RETURN in row for run in runs for row in run.curves.values):
        over_steps.legend(frameon=False)
    else:
        over_steps.text(0.5, 0.5, "no returns were logged here", ha="center", transform=over_steps.transAxes)


def _draw_ticks(axis: Any, bars: Sequence[tuple[FinishedRun, Any]], *, several: bool) -> None:
    """Two bars for each rank: its collector above its learner."""
    labelled: set[str] = set()
    for i, (run, rank) in enumerate(bars):
        for row, phases in enumerate((rank.collector_s, rank.learner_s)):
            start = 0.0
            for phase, seconds in phases.items():
                name = "waiting" if phase in ("wait", "collector_wait") else phase
                axis.barh(
                    i + 0.36 * row,
                    1e3 * seconds,
                    left=start,
                    height=0.34,
                    color=_COLOURS[phase],
                    label=None if name in labelled else name,
                )
                labelled.add(name)
                start += 1e3 * seconds
        who = f"{run.name}, {rank.name}" if several else rank.name
        axis.text(-0.01, i, f"{who}  collector", ha="right", va="center", fontsize=8, transform=_left_of(axis))
        axis.text(-0.01, i + 0.36, "learner", ha="right", va="center", fontsize=8, transform=_left_of(axis))
    axis.set(xlabel="one tick [ms]", yticks=[], ylim=(len(bars) - 0.4, -0.4))
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.legend(frameon=False, ncols=1, loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=8)


def _left_of(axis: Any) -> Any:
    """Places by share of the width, and by bar."""
    from matplotlib.transforms import blended_transform_factory

    return blended_transform_factory(axis.transAxes, axis.transData)
