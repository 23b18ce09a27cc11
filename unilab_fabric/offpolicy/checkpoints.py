"""What a checkpoint of an off-policy run holds: written by all ranks together, continued from by each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from unilab_fabric.checkpoints import (
    REPLICATED,
    CheckpointWriter,
    Fingerprint,
    check_layouts,
    envs_file,
    fingerprint,
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
from unilab_fabric.offpolicy.nonfinite import NonfiniteUpdates
from unilab_fabric.offpolicy.replay import Replay, joined_columns
from unilab_fabric.offpolicy.report import Reporter, tensor_of
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.replica import check_replicas, nonfinite_groups


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
        self._refuse_bad_state(progress.tick)
        writer = CheckpointWriter(self._folder, progress.tick)
        if self.score is not None and (self._best is None or self.score > self._best[0]):
            self._best = (self.score, writer.final.name)
        if self._ranks.rank == 0:
            writer.open()
        self._ranks.barrier("checkpoint opened")
        own = self._write_own(writer, progress.tick)
        files = {REPLICATED: writer.write(REPLICATED, self._replicated_state())} if self._ranks.rank == 0 else {}
        files |= self._of_all_ranks(own)
        if self._ranks.rank == 0:
            counters = {"tick": progress.tick, "env_steps": progress.env_steps, "updates": self._cycle.updates}
            replay = {"num_envs": self._replay.num_envs, "replay_ticks": self._replay_ticks()}
            figures = {"score": self.score, "train_s": progress.train_s}
            writer.close(self._manifest | counters | replay | figures, files)
            self._prune()
        return writer.final

    def _refuse_bad_state(self, tick: int) -> None:
        """A checkpoint that is worth nothing must not push out those that are good.

        Raises NonfiniteUpdates where a tensor of the replicated state is not finite, ReplicasDiffer where the ranks do
        not hold the same.
        """
        groups = nonfinite_groups(self._learner.replicated)
        if groups:
            raise NonfiniteUpdates(
                f"tick {tick}: no checkpoint was written, as the replicated state is not finite on rank "
                f"{self._ranks.rank}: {', '.join(groups)}"
            )
        check_replicas(self._learner.replicated, self._ranks, tick)

    def _write_own(self, writer: CheckpointWriter, tick: int) -> dict[str, Fingerprint]:
        """This rank's files."""
        envs, own = envs_file(self._ranks.rank), rank_file(self._ranks.rank)
        slot = self._collector.save_state(writer.folder / envs, tick)
        files = {own: writer.write(own, self._rank_state(slot))}
        return files if slot is None else {envs: fingerprint(writer.folder / envs), **files}

    def _of_all_ranks(self, own: dict[str, Fingerprint]) -> dict[str, Fingerprint]:
        """The files of every rank, once all of them are written; a collective."""
        absent = (-1, 0)
        names = (rank_file, envs_file)
        row = torch.tensor([own.get(name(self._ranks.rank), absent) for name in names], device=self._replay.device)
        rows = self._ranks.gather(row, "files of the checkpoint").tolist()
        return {
            name(rank): (size, crc)
            for rank, files in enumerate(rows)
            for name, (size, crc) in zip(names, files, strict=True)
            if size >= 0
        }

    def resume(self, path: Path) -> tuple[Progress, str]:
        """Continues from a checkpoint; returns one line that says what could not be continued, or nothing."""
        manifest = read_manifest(path)
        replicated = read_state(path, REPLICATED)
        check_layouts(self._learner.layouts, replicated["layouts"], path)
        restore(self._learner.replicated, replicated["learner"], path / REPLICATED)
        self._reporter.since_start[:] = replicated["since_start"].numpy()
        self._cycle.updates = manifest["updates"]
        self.score, self._best = manifest["score"], replicated["best"] and tuple(replicated["best"])
        progress = Progress(tick=manifest["tick"], env_steps=manifest["env_steps"], train_s=manifest["train_s"])
        if manifest["world_size"] != self._ranks.world_size:
            return progress, self._resume_with_other_ranks(path, manifest)
        return progress, self._resume_own(path, progress.tick)

    def _resume_own(self, path: Path, tick: int) -> str:
        """The state of this rank alone; returns what starts anew."""
        own = read_state(path, rank_file(self._ranks.rank))
        for name, generator in self._generators().items():
            generator.set_state(own["generators"][name])
        restore(self._learner.local, own["learner"], path / rank_file(self._ranks.rank))
        self._reporter.totals[:] = own["totals"].numpy()
        self._learner.metrics.copy_(own["metrics"])
        slot = own["slot"]
        self._collector.resume_at(tick, None if slot is None else slot.numpy().tobytes())
        if own["replay"] is not None:
            self._replay.load_state(own["replay"])
            if slot is None:
                self._replay.cut()
        missing = [name for name, part in (("environments", slot), ("replay", own["replay"])) if part is None]
        return f"the checkpoint holds no {' and no '.join(missing)}: these start anew" if missing else ""

    def _resume_with_other_ranks(self, path: Path, manifest: dict[str, Any]) -> str:
        """The replay, if the job has as many environments as before; returns what starts anew."""
        self._collector.resume_at(manifest["tick"], None)
        before, own = manifest["num_envs"], self._replay.num_envs
        kept = (
            before * manifest["world_size"] == own * self._ranks.world_size
            and 0 < manifest["replay_ticks"] <= self._replay.ticks
        )
        if kept:
            first = self._ranks.rank * own
            ranks = range(first // before, -(-(first + own) // before))
            states = [read_state(path, rank_file(rank))["replay"] for rank in ranks]
            self._replay.load_state(joined_columns(states, first - ranks[0] * before, first + own - ranks[0] * before))
            self._replay.cut()
        continues = "replicated state and replay continue" if kept else "replicated state continues"
        anew = "environments and generators" if kept else "environments, replay and generators"
        return (
            f"the checkpoint is of {manifest['world_size']} rank(s) and this job has {self._ranks.world_size}: "
            f"{continues}; {anew} start anew"
        )

    def _replay_ticks(self) -> int:
        """Ticks of replay that the checkpoint holds."""
        return self._replay.filled_ticks if self._settings.replay else 0

    def _generators(self) -> dict[str, torch.Generator]:
        return {"replay": self._replay.generator, **self._learner.generators}

    def _rank_state(self, slot: bytes | None) -> dict[str, Any]:
        return {
            "generators": {name: generator.get_state() for name, generator in self._generators().items()},
            "learner": {name: tensor.cpu() for name, tensor in self._learner.local.items()},
            "replay": self._replay.state() if self._settings.replay else None,
            "slot": None if slot is None else torch.frombuffer(bytearray(slot), dtype=torch.uint8),
            "totals": tensor_of(self._reporter.totals),
            "metrics": self._learner.metrics.cpu(),
        }

    def _replicated_state(self) -> dict[str, Any]:
        return {
            "learner": {name: tensor.cpu() for name, tensor in self._learner.replicated.items()},
            "layouts": {group: list(views) for group, views in self._learner.layouts.items()},
            "since_start": tensor_of(self._reporter.since_start),
            "best": self._best and list(self._best),
        }

    def _prune(self) -> None:
        kept = set(whole_checkpoints(self._folder)[-self._settings.keep_last :])
        if self._settings.keep_best and self._best is not None:
            kept.add(self._folder / "checkpoints" / self._best[1])
        prune(self._folder, kept)
