"""What a checkpoint of an off-policy run holds: written by all ranks together, continued from by each."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

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
    tick_of,
    whole_checkpoints,
)
from unilab_fabric.config import CheckpointConfig
from unilab_fabric.errors import UserError
from unilab_fabric.learners.learner import Replicated
from unilab_fabric.loop.collector import Collector, CollectorFailed
from unilab_fabric.loop.nonfinite import NonfiniteUpdates
from unilab_fabric.loop.report import Reporter, tensor_of
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


class Experience(Protocol):
    """Transitions that outlive a checkpoint; an off-policy run's replay."""

    ticks: int
    generator: torch.Generator

    @property
    def filled_ticks(self) -> int:
        """Ticks that are stored."""
        ...

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs."""
        ...

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continues where `state` was called."""
        ...

    def joined(self, states: Sequence[dict[str, Tensor]], first: int, last: int) -> dict[str, Tensor]:
        """The state that holds environments `first` to `last` - 1 of those of several ranks side by side."""
        ...

    def cut(self) -> None:
        """Ends the stream of transitions, as other environments follow."""
        ...


class Updates(Protocol):
    """Counts the updates of a run."""

    updates: int


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
        learner: Replicated,
        replay: Experience | None,
        counter: Updates,
        reporter: Reporter,
        ranks: Ranks,
        num_envs: int,
    ) -> None:
        """`folder` is the run's; `manifest` goes into every checkpoint as it is; `num_envs` are the rank's.

        `replay` is None for a run whose transitions do not outlive an update.
        """
        self.score = None
        self._best: tuple[float, str] | None = None  # score and folder name
        self._folder = folder
        self._settings = settings
        self._manifest = manifest
        self._collector = collector
        self._learner = learner
        self._replay = replay
        self._counter = counter
        self._num_envs = num_envs
        self._reporter = reporter
        self._ranks = ranks

    def due(self, tick: int, ticks: int) -> bool:
        """Whether one is to be written after the newest `ticks` ticks, of which `tick` is the last."""
        every = self._settings.every
        return every > 0 and tick // every > (tick - ticks) // every

    def save(self, progress: Progress, kept: Collection[Path] = ()) -> Path:
        """Writes a checkpoint of this moment, with all ranks, prunes the old ones but `kept`; returns its folder."""
        self._refuse_bad_state(progress.tick)
        writer = CheckpointWriter(self._folder, progress.tick)
        self._compare_score(writer.final.name)
        if self._ranks.rank == 0:
            writer.open()
        self._ranks.barrier("checkpoint opened")
        own = self._write_own(writer, progress.tick)
        files = {REPLICATED: writer.write(REPLICATED, self._replicated_state())} if self._ranks.rank == 0 else {}
        files |= self._of_all_ranks(own)
        if self._ranks.rank == 0:
            counters = {"tick": progress.tick, "env_steps": progress.env_steps, "updates": self._counter.updates}
            replay = {"num_envs": self._num_envs, "replay_ticks": self._replay_ticks()}
            best = self._best and self._best[1]
            figures = {"score": self.score, "best": best, "train_s": progress.train_s}
            writer.close(self._manifest | counters | replay | figures, files)
            self.prune(progress.tick, kept)
        return writer.final

    def prune(self, tick: int, others: Collection[Path] = ()) -> None:
        """Keeps the newest ones, the best and `others`; those after `tick` are of a course that this run has left.

        Rank 0 does it.
        """
        if self._ranks.rank > 0:
            return
        own = [path for path in whole_checkpoints(self._folder) if tick_of(path) <= tick]
        kept = {*own[-self._settings.keep_last :], *others}
        if self._settings.keep_best and self._best is not None:
            kept.add(self._folder / "checkpoints" / self._best[1])
        prune(self._folder, kept)

    def _compare_score(self, name: str) -> None:
        """Notes the checkpoint that is about to be written, if none before it had such a score."""
        if self.score is not None and math.isfinite(self.score) and (self._best is None or self.score > self._best[0]):
            self._best = (self.score, name)

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
        try:
            slot = self._collector.save_state(writer.folder / envs, tick)
        except CollectorFailed:
            (writer.folder / envs).unlink(missing_ok=True)  # half a file may hold the last free bytes of the disk
            raise
        files = {own: writer.write(own, self._rank_state(slot))}
        return files if slot is None else {envs: fingerprint(writer.folder / envs), **files}

    def _of_all_ranks(self, own: dict[str, Fingerprint]) -> dict[str, Fingerprint]:
        """The files of every rank, once all of them are written; a collective."""
        absent = (-1, 0)
        names = (rank_file, envs_file)
        row = torch.tensor(
            [own.get(name(self._ranks.rank), absent) for name in names], device=self._learner.metrics.device
        )
        rows = self._ranks.gather(row, "files of the checkpoint").tolist()
        return {
            name(rank): (size, crc)
            for rank, files in enumerate(rows)
            for name, (size, crc) in zip(names, files, strict=True)
            if size >= 0
        }

    def resume(self, path: Path) -> tuple[Progress, str]:
        """Continues from a checkpoint; returns one line that says what could not be continued, or nothing.

        Raises UserError where it does not fit this learner or this task.
        """
        manifest = read_manifest(path)
        replicated = read_state(path, REPLICATED, ("learner", "layouts", "since_start", "best"))
        check_layouts(self._learner.layouts, replicated["layouts"], path)
        restore(self._learner.replicated, replicated["learner"], path / REPLICATED)
        since_start = torch.from_numpy(self._reporter.since_start)
        restore({"since_start": since_start}, {"since_start": replicated["since_start"]}, path / REPLICATED)
        self._counter.updates = manifest["updates"]
        self.score, self._best = manifest["score"], replicated["best"] and tuple(replicated["best"])
        progress = Progress(tick=manifest["tick"], env_steps=manifest["env_steps"], train_s=manifest["train_s"])
        same_ranks = manifest["world_size"] == self._ranks.world_size
        told = self._resume_own(path, manifest) if same_ranks else self._resume_with_other_ranks(path, manifest)
        return progress, "; ".join(filter(None, [told, self._superseded(path)]))

    def _resume_own(self, path: Path, manifest: Mapping[str, Any]) -> str:
        """The state of this rank alone; returns what starts anew."""
        file, own = path / rank_file(self._ranks.rank), self._read_rank(path, self._ranks.rank, manifest)
        totals, metrics = torch.from_numpy(self._reporter.totals), self._learner.metrics
        restore({"totals": totals, "metrics": metrics}, {"totals": own["totals"], "metrics": own["metrics"]}, file)
        slot = own["slot"]
        self._collector.resume_at(manifest["tick"], None if slot is None else slot.numpy().tobytes())
        if slot is not None:  # what the learner keeps of environments goes with them
            restore(self._learner.local, own["learner"], file)
        if own["replay"] is not None and self._replay is not None:
            self._replay.load_state(own["replay"])
            if slot is None:
                self._replay.cut()
        parts = {
            "environments": slot is not None,
            "replay": own["replay"] is not None or self._replay is None,
            "generators for this kind of device": self._restore_generators(own["generators"], file),
        }
        missing = [name for name, continues in parts.items() if not continues]
        return f"the checkpoint holds no {' and no '.join(missing)}: these start anew" if missing else ""

    def _resume_with_other_ranks(self, path: Path, manifest: Mapping[str, Any]) -> str:
        """The replay, if the job has as many environments as before; returns what starts anew."""
        self._collector.resume_at(manifest["tick"], None)
        before, own = manifest["num_envs"], self._num_envs
        kept = (
            self._replay is not None
            and before * manifest["world_size"] == own * self._ranks.world_size
            and 0 < manifest["replay_ticks"] <= self._replay.ticks
        )
        if kept and self._replay is not None:
            first = self._ranks.rank * own
            ranks = range(first // before, -(-(first + own) // before))
            states = [self._read_rank(path, rank, manifest)["replay"] for rank in ranks]
            self._replay.load_state(
                self._replay.joined(states, first - ranks[0] * before, first + own - ranks[0] * before)
            )
            self._replay.cut()
        continues = "replicated state and replay continue" if kept else "replicated state continues"
        anew = "environments, replay and generators"
        if kept or self._replay is None:
            anew = "environments and generators"
        return (
            f"the checkpoint is of {manifest['world_size']} rank(s) and this job has {self._ranks.world_size}: "
            f"{continues}; {anew} start anew"
        )

    def _read_rank(self, path: Path, rank: int, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """A rank's part of a checkpoint.

        Raises UserError where its replay or its environments are not as the manifest says. All ranks hold to the same
        manifest, so replay is as long on each of them, and all begin to learn at the same tick.
        """
        state = read_state(path, rank_file(rank), ("generators", "learner", "replay", "slot", "totals", "metrics"))
        ticks = 0
        if state["replay"] is not None:
            oldest, newest = state["replay"]["counters"].tolist()[:2]
            ticks = newest - oldest
        if ticks != manifest["replay_ticks"]:
            told = f"its replay holds {ticks} ticks, and replay_ticks in the manifest is {manifest['replay_ticks']}"
            raise UserError("ckpt_path", path / rank_file(rank), told)
        if (state["slot"] is None) == (envs_file(rank) in manifest["files"]):
            told = f"its slot and {envs_file(rank)} belong together, and one of them is not there"
            raise UserError("ckpt_path", path / rank_file(rank), told)
        return state

    def _restore_generators(self, saved: Mapping[str, Tensor], file: Path) -> bool:
        """Whether the generators continue: a CPU's and a GPU's have states of different kinds."""
        states = {name: generator.get_state() for name, generator in self._generators().items()}
        if saved.keys() == states.keys() and any(saved[name].shape != states[name].shape for name in states):
            return False
        restore(states, saved, file)
        for name, generator in self._generators().items():
            generator.set_state(states[name])
        return True

    def _superseded(self, path: Path) -> str:
        """What is to be said of checkpoints of this run that lie after the one it continues from."""
        if path.resolve().parent != (self._folder / "checkpoints").resolve():
            return ""
        later = [other.name for other in whole_checkpoints(self._folder) if tick_of(other) > tick_of(path)]
        return f"later checkpoints go when this run writes its first: {', '.join(later)}" if later else ""

    def _replay_ticks(self) -> int:
        """Ticks of replay that the checkpoint holds."""
        return self._replay.filled_ticks if self._settings.replay and self._replay is not None else 0

    def _generators(self) -> dict[str, torch.Generator]:
        own = {} if self._replay is None else {"replay": self._replay.generator}
        return {**own, **self._learner.generators}

    def _rank_state(self, slot: bytes | None) -> dict[str, Any]:
        return {
            "generators": {name: generator.get_state() for name, generator in self._generators().items()},
            "learner": {name: tensor.cpu() for name, tensor in self._learner.local.items()},
            "replay": self._replay.state() if self._settings.replay and self._replay is not None else None,
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
