"""The loop that all training runs in: steps, reports, checks, checkpoints, and the end that all ranks agree on.

A step is what a subclass does between two looks at all of that: one tick, or one iteration of several.
"""

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch

from unilab_fabric.config import TrainingConfig
from unilab_fabric.hooks.hook import Hooks, RankFigures
from unilab_fabric.learners.learner import Replicated
from unilab_fabric.loop.checkpoints import Progress, RunCheckpoints
from unilab_fabric.loop.collector import Collector
from unilab_fabric.loop.nonfinite import NonfiniteWatch
from unilab_fabric.loop.profiling import TickProfile
from unilab_fabric.loop.report import Reporter
from unilab_fabric.loop.slots import Slot
from unilab_fabric.loop.transfer import Transfer
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.replica import check_replicas
from unilab_fabric.parallel.vote import StopVote

BEST_BY = "Train/mean_reward"
OWN_REASON = 1  # stop code of a rank that has a reason of its own, not a signal's


class Runner(ABC):
    """One rank of a run. Every rank has one, and all of them take the same decisions at the same ticks."""

    ticks_per_step = 1
    """Ticks of one step."""

    def __init__(
        self,
        *,
        folder: Path,
        training: TrainingConfig,
        checkpoints: RunCheckpoints,
        collector: Collector,
        learner: Replicated,
        nonfinite: NonfiniteWatch,
        transfer: Transfer,
        reporter: Reporter,
        ranks: Ranks,
        hooks: Hooks,
    ) -> None:
        """`hooks` is empty on ranks above 0."""
        self.folder = folder
        self.tick = 0
        self.last_tick = 0
        self.env_steps = 0
        self.stop_reason = ""
        self.stop_code = 0
        self.rank_figures: Sequence[RankFigures] = ()
        self.first_tick_at: float | None = None
        self.skipped_updates = 0
        self.kept: set[Path] = set()
        self._training = training
        self._checkpoints = checkpoints
        self._collector = collector
        self._transfer = transfer
        self._reporter = reporter
        self._ranks = ranks
        self._hooks = hooks
        self.env_steps_per_tick = ranks.world_size * len(collector.next_slot(0).reward)
        self._own_stop = (0, "")
        self._replicated = learner.replicated
        self._nonfinite = nonfinite
        self._vote = StopVote(ranks, learner.metrics.device)
        self._profile = TickProfile(training.profile, folder, ranks, learner.metrics.device)
        self._train_s = 0.0  # in the loop, before this process
        self._loop_since = time.perf_counter()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains to the end, or until a rank asks to stop; then writes the last checkpoint."""
        left = self._training.max_env_steps - self.env_steps
        steps = max(0, -(-left // (self.env_steps_per_tick * self.ticks_per_step)))
        self.last_tick = self.tick + steps * self.ticks_per_step
        for name, tensor in self._replicated.items():
            self._ranks.broadcast_(tensor, name)
        with self._in_hooks("on_start"):
            self._hooks.on_start(self)
        self._reporter.start_clock()
        self._loop_since = time.perf_counter()
        while self.tick < self.last_tick and not self.stop_code:
            updates = self._reporter.all_updates
            self.advance()
            self._profile.after_step(self.ticks_per_step, self._reporter.all_updates - updates)
            self._end_step()
            if self._passed(self._training.log_every) or self.tick == self.last_tick or self.stop_code:
                self._log()
            if self._passed(self._training.replica_check_every):
                check_replicas(self._replicated, self._ranks, self.tick)
            ends = self.tick >= self.last_tick or self.stop_code != 0
            if self._checkpoints.due(self.tick, self.ticks_per_step) and not ends:
                self._save()
        self._profile.close()
        self._vote.close()
        self._save()

    def finish(self) -> None:
        """Has the hooks end, and removes the checkpoints that none of them keeps any longer."""
        with self._ranks.doing("in the hooks' on_end", "pauses"):
            self._hooks.on_end(self, "stopped" if self.stop_code else "completed")
            self._checkpoints.prune(self.tick, self.kept)

    @abstractmethod
    def advance(self) -> None:
        """Does the ticks of one step; counts each with `_end_tick`."""

    def _end_tick(self, filled: Slot, updates: int) -> None:
        """Counts a tick that began with this slot and has made so many updates."""
        self._reporter.totals += filled.totals
        self._reporter.count_collector(filled.collector_s)
        self._reporter.count_tick(self.env_steps_per_tick // self._ranks.world_size, updates)
        self.env_steps += self.env_steps_per_tick
        if filled.stop[0] and not self._own_stop[0]:
            self.stop(f"{signal.Signals(filled.stop[0]).name} at a collector", int(filled.stop[0]))
        self.tick += 1
        if self.first_tick_at is None:
            self.first_tick_at = time.time()
        with self._in_hooks("on_tick_end"):
            self._hooks.on_tick_end(self)

    def _end_step(self) -> None:
        """Agrees on whether to stop."""
        self.stop_code = self._vote.exchange(self._own_stop[0])
        if self.stop_code:
            self.stop_reason = self._own_stop[1] or "another rank asked for it"

    def _passed(self, every: int) -> bool:
        """Whether the newest step has reached a multiple of `every` ticks; 0 is never reached."""
        return every > 0 and self.tick // every > (self.tick - self.ticks_per_step) // every

    @property
    def train_s(self) -> float:
        """Seconds [s] in the loop, those before a resume included."""
        return self._train_s + time.perf_counter() - self._loop_since

    def stop(self, reason: str, code: int = OWN_REASON) -> None:
        """Ends the run, on all ranks after the same step; `code` is a signal's number where a signal asks for it.

        Alone that is the running step; with more ranks at most two more follow, until all have read the vote.
        """
        self._own_stop = (code, reason)

    def close(self) -> None:
        """Lets go of the slots; before the collector's end and before the process group is left."""
        self._transfer.close()

    def resume(self, path: Path) -> str:
        """Continues from a checkpoint; returns one line that says what could not be continued, or nothing."""
        progress, warning = self._checkpoints.resume(path)
        self.tick, self.env_steps, self._train_s = progress.tick, progress.env_steps, progress.train_s
        return warning

    # ---- what happens now and then --------------------------------------------------------------------------------

    def _log(self) -> None:
        report = self._reporter.report()
        self.rank_figures = report.rank_figures
        self.skipped_updates = self._nonfinite.look(self.tick)
        self._checkpoints.score = report.metrics.get(BEST_BY, self._checkpoints.score)
        with self._in_hooks("on_log"):
            self._hooks.on_log(self, report.metrics)

    def _save(self) -> None:
        progress = Progress(tick=self.tick, env_steps=self.env_steps, train_s=self.train_s)
        path = self._checkpoints.save(progress, self.kept)
        with self._in_hooks("on_checkpoint"):
            self._hooks.on_checkpoint(self, path)

    def _in_hooks(self, method: str) -> AbstractContextManager[None]:
        """Hooks may take their time: the other ranks wait, and say for what."""
        return self._ranks.doing(f"in a hook's {method} at tick {self.tick}", "pauses")

    # ---- what every step does -------------------------------------------------------------------------------------

    def _wait_filled(self) -> Slot:
        """The slot of this tick."""
        self._ranks.at(f"tick {self.tick}")
        with self._timed("wait"), self._ranks.doing(f"waiting for its collector at tick {self.tick}", "waits"):
            return self._collector.wait_filled(self.tick)

    def _act(self, action: torch.Tensor) -> None:
        """Hands the actions (num_envs, actions) of this tick over; physics runs from here."""
        self._transfer.give(action, self._collector.next_slot(self.tick))
        self._collector.release()

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        waits = self._ranks.waits
        started, before = time.perf_counter(), waits.seconds
        with self._profile.phase(phase):
            yield
        self._reporter.count_phase(phase, time.perf_counter() - started, waits.seconds - before)
