"""The loop of off-policy training: one tick is one step of all environments beside one cycle of updates."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from unilab_fabric.config import TrainingConfig
from unilab_fabric.hooks.hook import Hooks, RankFigures
from unilab_fabric.learners.learner import Learner
from unilab_fabric.offpolicy.checkpoints import Progress, RunCheckpoints
from unilab_fabric.offpolicy.collector import Collector
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.offpolicy.nonfinite import NonfiniteWatch
from unilab_fabric.offpolicy.replay import Replay
from unilab_fabric.offpolicy.report import Reporter
from unilab_fabric.offpolicy.slots import Slot
from unilab_fabric.offpolicy.transfer import Transfer
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.replica import check_replicas
from unilab_fabric.parallel.vote import StopVote

BEST_BY = "Train/mean_reward"
OWN_REASON = 1  # stop code of a rank that has a reason of its own, not a signal's


class OffPolicyRunner:
    """One rank of a run. Every rank has one, and all of them take the same decisions at the same ticks."""

    def __init__(
        self,
        *,
        folder: Path,
        training: TrainingConfig,
        checkpoints: RunCheckpoints,
        collector: Collector,
        learner: Learner,
        replay: Replay,
        cycle: Cycle,
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
        self._training = training
        self._checkpoints = checkpoints
        self._collector = collector
        self._learner = learner
        self._replay = replay
        self._cycle = cycle
        self._transfer = transfer
        self._reporter = reporter
        self._ranks = ranks
        self._hooks = hooks
        self.env_steps_per_tick = ranks.world_size * len(collector.next_slot(0).reward)
        self._own_stop = (0, "")
        self._nonfinite = NonfiniteWatch(learner, replay, ranks, folder, training.max_skipped_updates)
        self._vote = StopVote(ranks, replay.device)
        self._train_s = 0.0  # in the loop, before this process
        self._loop_since = time.perf_counter()

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains to the end, or until a rank asks to stop; then writes the last checkpoint."""
        left = self._training.max_env_steps - self.env_steps
        self.last_tick = self.tick + max(0, -(-left // self.env_steps_per_tick))
        for name, tensor in self._learner.replicated.items():
            self._ranks.broadcast_(tensor, name)
        with self._in_hooks("on_start"):
            self._hooks.on_start(self)
        self._reporter.start_clock()
        self._loop_since = time.perf_counter()
        while self.tick < self.last_tick and not self.stop_code:
            self._run_tick()
            if self.tick % self._training.log_every == 0 or self.tick == self.last_tick or self.stop_code:
                self._log()
            if self._training.replica_check_every and self.tick % self._training.replica_check_every == 0:
                check_replicas(self._learner.replicated, self._ranks, self.tick)
            if self._checkpoints.due(self.tick) and self.tick < self.last_tick and not self.stop_code:
                self._save()
        self._vote.close()
        self._save()

    def _run_tick(self) -> None:
        self._ranks.at(f"tick {self.tick}")
        with self._timed("wait"), self._ranks.doing(f"waiting for its collector at tick {self.tick}", "waits"):
            filled = self._collector.wait_filled(self.tick)
        with self._timed("commit"):
            handover = self._transfer.take(filled)
            if self._replay.streaming:
                self._replay.commit(handover)
                self._learner.observe(handover.reward, handover.ended_env)
            else:
                self._replay.begin(self.tick, handover)
        with self._timed("act"):
            self._transfer.give(self._learner.act(handover.actor), self._collector.next_slot(self.tick))
            self._collector.release()  # physics runs from here ...
        with self._timed("update"):
            updates = self._cycle.run()  # ... while we learn from what came before
        self._count(filled, updates)
        if filled.stop[0] and not self._own_stop[0]:
            self.stop(f"{signal.Signals(filled.stop[0]).name} at a collector", int(filled.stop[0]))
        self.tick += 1
        if self.first_tick_at is None:
            self.first_tick_at = time.time()
        with self._in_hooks("on_tick_end"):
            self._hooks.on_tick_end(self)
        self.stop_code = self._vote.exchange(self._own_stop[0])
        if self.stop_code:
            self.stop_reason = self._own_stop[1] or "another rank asked for it"

    @property
    def train_s(self) -> float:
        """Seconds [s] in the loop, those before a resume included."""
        return self._train_s + time.perf_counter() - self._loop_since

    def stop(self, reason: str, code: int = OWN_REASON) -> None:
        """Ends the run, on all ranks after the same tick; `code` is a signal's number where a signal asks for it.

        Alone that is the running tick; with more ranks at most two more follow, until all have read the vote.
        """
        self._own_stop = (code, reason)

    def close(self) -> None:
        """Lets go of graphs and slots; before the collector's end and before the process group is left."""
        self._cycle.close()
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
        path = self._checkpoints.save(Progress(tick=self.tick, env_steps=self.env_steps, train_s=self.train_s))
        with self._in_hooks("on_checkpoint"):
            self._hooks.on_checkpoint(self, path)

    def _in_hooks(self, method: str) -> AbstractContextManager[None]:
        """Hooks may take their time: the other ranks wait, and say for what."""
        return self._ranks.doing(f"in a hook's {method} at tick {self.tick}", "pauses")

    def _count(self, filled: Slot, updates: int) -> None:
        self._reporter.totals += filled.totals
        self._reporter.phase_s["physics"] += filled.collector_s[0]
        self._reporter.phase_s["collector_wait"] += filled.collector_s[1]
        self._reporter.count_tick(self.env_steps_per_tick // self._ranks.world_size, updates)
        self.env_steps += self.env_steps_per_tick

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._reporter.phase_s[phase] += time.perf_counter() - started
