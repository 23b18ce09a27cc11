"""What a checkpoint of an off-policy run holds: written by all ranks together, continued from by each."""

from dataclasses import dataclass
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
from unilab_fabric.config import CheckpointConfig
from unilab_fabric.learners.learner import Learner
from unilab_fabric.offpolicy.collector import Collector
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.offpolicy.replay import Replay
from unilab_fabric.offpolicy.report import Reporter, tensor_of
from unilab_fabric.parallel.reduce import Ranks


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run has come."""

    tick: int
    """Ticks done."""
    env_steps: int
    """Environment steps done, of the job."""
    train_s: float
    """Seconds [s] in the loop, those before a resume included."""


class RunCheckpoints:
    """One rank's hand in the checkpoints of a run; every rank calls the same methods at the same ticks."""

    score: float | None
    """Newest figure by which the best checkpoint is chosen; the runner sets it."""

    def __init__(
        self,
        *,
        folder: Path,
        settings: CheckpointConfig,
        manifest: dict[str, Any],
        collector: Collector,
        learner: Learner,
        replay: Replay,
        cycle: Cycle,
        reporter: Reporter,
        ranks: Ranks,
    ) -> None:
        """`folder` is the run's; `manifest` goes into every checkpoint as it is."""
        self.score = None
        self._best: tuple[float, str] | None = None  # score and folder name
        self._folder = folder
        self._settings = settings
        self._manifest = manifest
        self._collector = collector
        self._learner = learner
        self._replay = replay
        self._cycle = cycle
        self._reporter = reporter
        self._ranks = ranks

    def due(self, tick: int) -> bool:
        """Whether one is to be written at this tick."""
        return self._settings.every > 0 and tick % self._settings.every == 0

    def save(self, progress: Progress) -> Path:
        """Writes a checkpoint of this moment, with all ranks, and prunes the old ones; returns its folder."""
        writer = CheckpointWriter(self._folder, progress.tick)
        if self.score is not None and (self._best is None or self.score > self._best[0]):
            self._best = (self.score, writer.final.name)
        if self._ranks.rank == 0:
            writer.open()
        self._ranks.barrier("checkpoint opened")
        slot = self._collector.save_state(writer.folder / envs_file(self._ranks.rank), progress.tick)
        writer.write(rank_file(self._ranks.rank), self._rank_state(slot))
        if self._ranks.rank == 0:
            writer.write(REPLICATED, self._replicated_state())
        self._ranks.barrier("checkpoint written")
        if self._ranks.rank == 0:
            counters = {"tick": progress.tick, "env_steps": progress.env_steps, "updates": self._cycle.updates}
            figures = {"score": self.score, "train_s": progress.train_s}
            writer.close(self._manifest | counters | figures)
            self._prune()
        return writer.final

    def resume(self, path: Path) -> tuple[Progress, str]:
        """Continues from a checkpoint; returns one line that says what could not be continued, or nothing."""
        manifest = read_manifest(path)
        replicated = read_state(path, REPLICATED)
        restore(self._learner.replicated, replicated["learner"], path)
        self._reporter.since_start[:] = replicated["since_start"].numpy()
        self._cycle.updates = manifest["updates"]
        self.score, self._best = manifest["score"], replicated["best"] and tuple(replicated["best"])
        progress = Progress(tick=manifest["tick"], env_steps=manifest["env_steps"], train_s=manifest["train_s"])
        if manifest["world_size"] != self._ranks.world_size:
            self._collector.resume_at(progress.tick, None)
            return progress, (
                f"the checkpoint is of {manifest['world_size']} ranks and this job has {self._ranks.world_size}: the "
                "replicated state continues; environments, replay and generators start anew"
            )
        return progress, self._resume_own(progress.tick, read_state(path, rank_file(self._ranks.rank)))

    def _resume_own(self, tick: int, own: dict[str, Any]) -> str:
        """The state of this rank alone; returns what starts anew."""
        for name, generator in self._generators().items():
            generator.set_state(own["generators"][name])
        self._reporter.totals[:] = own["totals"].numpy()
        self._learner.metrics.copy_(own["metrics"])
        slot = own["slot"]
        self._collector.resume_at(tick, None if slot is None else slot.numpy().tobytes())
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
            "replay": self._replay.state() if self._settings.replay else None,
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
        kept = set(whole_checkpoints(self._folder)[-self._settings.keep_last :])
        if self._settings.keep_best and self._best is not None:
            kept.add(self._folder / "checkpoints" / self._best[1])
        prune(self._folder, kept)
