"""What may watch a run: typed, empty methods; a subclass overrides those it needs with `@override`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class RankFigures:
    """One rank's figures of one interval between two reports."""

    seconds: float
    """Length of the interval [s]."""
    env_steps: int
    """Environment steps of this rank."""
    updates: int
    """Critic updates of this rank."""
    phase_s: Mapping[str, float]
    """Seconds [s] in each phase of the tick, by name."""


class Run(Protocol):
    """What a hook sees of a run: plain numbers and paths, nothing that could reach another rank."""

    folder: Path
    """The run folder."""
    tick: int
    """Ticks done."""
    last_tick: int
    """Ticks of the whole run."""
    env_steps: int
    """Environment steps done, of the job."""
    env_steps_per_tick: int
    """Environment steps of one tick, of the job."""
    first_tick_at: float | None
    """When the first tick ended, in seconds [s] since the epoch."""
    stop_reason: str
    """Why the run was stopped, if it was."""
    skipped_updates: int
    """Optimiser steps skipped for a non-finite gradient, up to the newest report."""
    rank_figures: Sequence[RankFigures]
    """Figures of the newest interval, by rank."""
    kept: set[Path]
    """Checkpoints that are not to be removed, whatever their age; a hook's to set."""

    def stop(self, reason: str) -> None:
        """Ends the run on all ranks at the next report, with this reason; a checkpoint is written."""
        ...


class Hook:
    """Base of every hook. Rank 0 runs them, in order; a hook that raises ends the job and is named."""

    def on_start(self, run: Run) -> None:
        """Before the first tick."""

    def on_tick_end(self, run: Run) -> None:
        """After each tick; keep it short."""

    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        """Every `training.log_every` ticks, with the job's metrics by tag."""

    def on_checkpoint(self, run: Run, path: Path) -> None:
        """After a checkpoint has been written, with its folder."""

    def on_end(self, run: Run, status: str) -> None:
        """Once, at the end: status is completed, stopped or failed."""


class HookFailed(RuntimeError):
    """A hook raised; the text names it, the method and the tick."""


class Hooks(Hook):
    """A list of hooks called as one."""

    def __init__(self, hooks: list[Hook]) -> None:
        self._hooks = hooks

    @override
    def on_start(self, run: Run) -> None:
        self._call("on_start", run)

    @override
    def on_tick_end(self, run: Run) -> None:
        self._call("on_tick_end", run)

    @override
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._call("on_log", run, metrics)

    @override
    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._call("on_checkpoint", run, path)

    @override
    def on_end(self, run: Run, status: str) -> None:
        self._call("on_end", run, status)

    def _call(self, method: str, run: Run, *arguments: object) -> None:
        for hook in self._hooks:
            try:
                getattr(hook, method)(run, *arguments)
            except Exception as error:  # any hook may raise anything; the user must read which one it was
                name = type(hook).__qualname__
                raise HookFailed(f"hook {name} failed in {method} at tick {run.tick}: {error}") from error
