"""The loop of off-policy training: one tick is one step of all environments beside one cycle of updates."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from unilab_fabric.checkpoints import (
    REPLICATED,
    CheckpointWriter,
    envs_file,
    prune,
    rank_file,
    read_manifest,
    read_state,
    restore,
    whole_checkpoints,
)
from unilab_fabric.config import CheckpointConfig, TrainingConfig
from unilab_fabric.hooks.hook import Hooks, RankFigures
from unilab_fabric.learners.learner import Learner
from unilab_fabric.offpolicy.collector import Collector
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.offpolicy.replay import Replay
from unilab_fabric.offpolicy.report import Reporter, tensor_of
from unilab_fabric.offpolicy.slots import Slot
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.replica import check_replicas

BEST_BY = "Train/mean_reward"
OWN_REASON = 1  # stop code of a rank that has a reason of its own, not a signal's


class OffPolicyRunner:
    """One rank of a run. Every rank has one, and all of them take the same decisions at the same ticks."""

    def __init__(
        self,
        *,
        folder: Path,
        training: TrainingConfig,
        checkpoint: CheckpointConfig,
        manifest: dict[str, Any],
        collector: Collector,
        learner: Learner,
        replay: Replay,
        cycle: Cycle,
        reporter: Reporter,
        ranks: Ranks,
        hooks: Hooks,
    ) -> None:
        """`manifest` goes into every checkpoint as it is; `hooks` is empty on ranks above 0."""
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
        self._checkpoint = checkpoint
        self._manifest = manifest
        self._collector = collector
        self._learner = learner
        self._replay = replay
        self._cycle = cycle
        self._reporter = reporter
        self._ranks = ranks
        self._hooks = hooks
        self.env_steps_per_tick = ranks.world_size * len(collector.next_slot(0).reward)
        self._own_stop = (0, "")
        self._train_s = 0.0  # in the loop, before this process
        self._loop_since = time.perf_counter()
        self._score: float | None = None  # newest BEST_BY
        self._best: tuple[float, str] | None = None  # score and folder name

    # ---- the loop -------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Trains to the end, or until a rank asks to stop; then writes the last checkpoint."""
        left = self._training.max_env_steps - self.env_steps
        self.last_tick = self.tick + max(0, -(-left // self.env_steps_per_tick))
        for tensor in self._learner.replicated.values():
            self._ranks.broadcast_(tensor)
        self._hooks.on_start(self)
        self._reporter.start_clock()
        self._loop_since = time.perf_counter()
        while self.tick < self.last_tick and not self.stop_code:
            self._run_tick()
            if self.tick % self._training.log_every == 0 or self.tick == self.last_tick or self._alone_and_stopping():
                self._log()
            if self._due(self._training.replica_check_every):
                check_replicas(self._learner.replicated, self._ranks, self.tick)
            if self._due(self._checkpoint.every) and self.tick < self.last_tick and not self.stop_code:
                self.save()
        self.save()

    def _run_tick(self) -> None:
        with self._timed("wait"):
            filled = self._collector.wait_filled(self.tick)
        with self._timed("commit"):
            if self._replay.newest_tick == self.tick - 1:
                self._replay.commit(filled)
            else:
                self._replay.begin(self.tick, filled)
        with self._timed("act"):
            action = self._learner.act(torch.from_numpy(filled.actor).to(self._replay.device, copy=True))
            torch.from_numpy(self._collector.next_slot(self.tick).action).copy_(action)
            self._collector.release()  # physics runs from here ...
        with self._timed("update"):
            updates = self._cycle.run()  # ... while we learn from what came before
        self._count(filled, updates)
        self.tick += 1
        if self.first_tick_at is None:
            self.first_tick_at = time.time()
        self._hooks.on_tick_end(self)

    @property
    def train_s(self) -> float:
        """Seconds [s] in the loop, those before a resume included."""
        return self._train_s + time.perf_counter() - self._loop_since

    def stop(self, reason: str, code: int = OWN_REASON) -> None:
        """Ends the run, on all ranks at the same tick; `code` is a signal's number where a signal asks for it."""
        self._own_stop = (code, reason)

    # ---- what happens now and then --------------------------------------------------------------------------------

    def _log(self) -> None:
        report = self._reporter.report(self._own_stop[0])
        self.rank_figures = report.rank_figures
        self.stop_code = report.stop_code
        self.skipped_updates = int(self._learner.skipped_updates())
        if self.stop_code:
            self.stop_reason = self._own_stop[1] or "another rank asked for it"
        self._score = report.metrics.get(BEST_BY, self._score)
        self._hooks.on_log(self, report.metrics)

    def _alone_and_stopping(self) -> bool:
        """With one rank nobody else must agree, so the running tick is the last one."""
        return self._ranks.world_size == 1 and self._own_stop[0] != 0

    def _due(self, every: int) -> bool:
        return every > 0 and self.tick % every == 0

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

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def save(self) -> Path:
        """Writes a checkpoint of this moment, with all ranks, and prunes the old ones."""
        writer = CheckpointWriter(self.folder, self.tick)
        if self._score is not None and (self._best is None or self._score > self._best[0]):
            self._best = (self._score, writer.final.name)
        if self._ranks.rank == 0:
            writer.open()
        self._ranks.barrier()
        slot = self._collector.save_state(writer.folder / envs_file(self._ranks.rank), self.tick)
        writer.write(rank_file(self._ranks.rank), self._rank_state(slot))
        if self._ranks.rank == 0:
            writer.write(REPLICATED, self._replicated_state())
        self._ranks.barrier()
        if self._ranks.rank == 0:
            counters = {"tick": self.tick, "env_steps": self.env_steps, "updates": self._cycle.updates}
            figures = {"score": self._score, "train_s": self.train_s}
            writer.close(self._manifest | counters | figures)
            self._prune()
            self._hooks.on_checkpoint(self, writer.final)
        return writer.final

    def resume(self, path: Path) -> str:
        """Continues from a checkpoint; returns one line that says what could not be continued, or nothing."""
        manifest = read_manifest(path)
        replicated = read_state(path, REPLICATED)
        restore(self._learner.replicated, replicated["learner"], path)
        self._reporter.since_start[:] = replicated["since_start"].numpy()
        self.tick, self.env_steps = manifest["tick"], manifest["env_steps"]
        self._cycle.updates = manifest["updates"]
        self._train_s = manifest["train_s"]
        self._score, self._best = manifest["score"], replicated["best"] and tuple(replicated["best"])
        if manifest["world_size"] != self._ranks.world_size:
            self._collector.resume_at(self.tick, None)
            return (
                f"the checkpoint is of {manifest['world_size']} ranks and this job has {self._ranks.world_size}: the "
                "replicated state continues; environments, replay and generators start anew"
            )
        own = read_state(path, rank_file(self._ranks.rank))
        for name, generator in self._generators().items():
            generator.set_state(own["generators"][name])
        self._reporter.totals[:] = own["totals"].numpy()
        self._learner.metrics.copy_(own["metrics"])
        slot = own["slot"]
        self._collector.resume_at(self.tick, None if slot is None else slot.numpy().tobytes())
        anew = [] if slot is not None else ["environments"]
        if slot is not None and own["replay"] is not None:
            self._replay.load_state(own["replay"])
        else:
            anew.append("replay")
        return f"the checkpoint holds no {' and no '.join(anew)}: these start anew" if anew else ""

    def _generators(self) -> dict[str, torch.Generator]:
        return {"replay": self._replay.generator, **self._learner.generators}

    def _rank_state(self, slot: bytes | None) -> dict[str, Any]:
        return {
            "generators": {name: generator.get_state() for name, generator in self._generators().items()},
            "replay": self._replay.state() if self._checkpoint.replay else None,
            "slot": None if slot is None else torch.frombuffer(bytearray(slot), dtype=torch.uint8),
            "totals": tensor_of(self._reporter.totals),
            "metrics": self._learner.metrics.cpu(),
        }

    def _replicated_state(self) -> dict[str, Any]:
        return {
            "learner": {name: tensor.cpu() for name, tensor in self._learner.replicated.items()},
            "since_start": tensor_of(self._reporter.since_start),
            "best": self._best and list(self._best),
        }

    def _prune(self) -> None:
        kept = set(whole_checkpoints(self.folder)[-self._checkpoint.keep_last :])
        if self._checkpoint.keep_best and self._best is not None:
            kept.add(self.folder / "checkpoints" / self._best[1])
        prune(self.folder, kept)
