"""What the files of a run say of its speed: the summary, the settings and the curves."""

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import yaml

from unilab_fabric import __version__
from unilab_fabric.arguments import flat
from unilab_fabric.errors import Problems, UserError
from unilab_fabric.loop.phases import LEARNER_PHASES, PHASES, WORK_OF_COLLECTOR

RETURN = "Train/mean_reward"
RATE = "Perf/env_steps_per_sec"
UPDATES = "Perf/updates_per_sec"
_NEEDED = ("status", "env_steps", "ticks", "env_steps_per_sec", "wall_s", "ranks", "topology", "world_size", "versions")
_NEEDED_OF_RANK = ("rank", "env_steps", "env_steps_per_sec", "updates", "seconds")


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """Where a tick of one rank goes, seconds [s]."""

    name: str
    """What the report calls it: rank 0."""
    place: str = ""
    """Its machine or its cores, where they are known."""
    tick_s: float
    """Mean length of a tick, checkpoints and reports included."""
    phase_s: Mapping[str, float]
    """By phase of `loop.phases`, as far as they were measured."""
    one_core: bool = False
    """Whether collector and learner share a single core."""

    @property
    def learner_s(self) -> dict[str, float]:
        """The learner's phases, `other` being what none of them holds: checkpoints, reports, the vote."""
        own = {phase: self.phase_s[phase] for phase in LEARNER_PHASES if phase in self.phase_s}
        return own | {"other": max(0.0, self.tick_s - sum(own.values()))}

    @property
    def collector_s(self) -> dict[str, float]:
        """The collector's phases. Its wait is what the others leave of a tick: the one measured, which is also that for
        the first tick, is longer."""
        own = {phase: self.phase_s[phase] for phase in WORK_OF_COLLECTOR if phase in self.phase_s}
        return own | {"collector_wait": max(0.0, self.tick_s - sum(own.values()))}

    @property
    def stepping_s(self) -> float:
        """All that the collector does in a tick, [s]."""
        return sum(self.phase_s.get(phase, 0.0) for phase in WORK_OF_COLLECTOR)

    @property
    def between_ranks_s(self) -> float | None:
        """Seconds [s] in collectives, waiting for the slowest rank included; None where they were not measured."""
        return self.phase_s.get("all_reduce")


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The logged metrics, one entry for each report."""

    env_steps: Sequence[int] = ()
    """Environment steps of the job."""
    values: Sequence[Mapping[str, float]] = ()
    """By tag; what nobody counted is absent."""

    @cached_property
    def seconds(self) -> list[float]:
        """Training seconds [s] of each report: steps over their rate, summed, so the pause of a resume is not in it."""
        rows = zip(pairwise((0, *self.env_steps)), self.values, strict=True)
        taken = [(after - before) / row[RATE] if row.get(RATE) else 0.0 for (before, after), row in rows]
        return list(accumulate(taken))

    def second_half(self, tag: str) -> float | None:
        """Mean of a tag over the second half of the reports; None where it is in none of them."""
        found = [row[tag] for row in self.values[len(self.values) // 2 :] if tag in row]
        return sum(found) / len(found) if found else None

    def last(self, tag: str) -> float | None:
        """The newest value of a tag."""
        return next((row[tag] for row in reversed(self.values) if tag in row), None)


@dataclass(frozen=True, kw_only=True)
class FinishedRun:
    """One run, as its files tell."""

    name: str
    settings: Mapping[str, Any]
    """Every setting by its dotted name."""
    status: str
    note: str = ""
    """What is missing, and why; empty for a run that came to its end."""
    on_cuda: bool
    world_size: int
    num_nodes: int
    env_steps: int
    wall_s: float | None
    first_tick_s: float | None
    rate: float
    """Environment steps a second [1/s] of the job: the mean of the second half of the reports."""
    updates_per_s: float
    """Critic updates a second [1/s], summed over ranks, likewise."""
    cores: int | None
    """Cores of the job, where they are known."""
    final_return: float | None
    env_steps_per_tick: float
    """Of the job."""
    versions: Mapping[str, str]
    ranks: tuple[RankTimes, ...]
    curves: Curves

    @property
    def learner(self) -> str:
        """Class name of the learner."""
        return str(self.settings.get("learner.class_path", "?")).rpartition(".")[2]

    @property
    def task(self) -> str:
        """Name of the task."""
        return str(self.settings.get("task.class_path", "?"))

    @property
    def on_policy(self) -> bool:
        """Whether a rollout and the updates on it take turns."""
        return self.learner == "PPO"


def find_runs(names: Sequence[str], log_root: Path = Path("runs")) -> list[Path]:
    """The run folders that the names mean, `last` being the newest under `log_root`. Raises UserErrors."""
    problems, folders = Problems(), []
    for name in names:
        folder = _newest(log_root) if name == "last" else Path(name)
        if folder is None:
            problems.add("run", name, f"there is no run under {log_root}")
        elif not folder.is_dir():
            problems.add("run", name, "there is no such folder; allowed: last, or the folder of a run")
        elif not (folder / "config.yaml").is_file():
            problems.add(
                "run", name, "this folder is no run's, it has no config.yaml; allowed: last, or a run's folder"
            )
        else:
            folders.append(folder)
    problems.raise_any()
    return folders


def _newest(log_root: Path) -> Path | None:
    files = sorted(log_root.glob("*/config.yaml"), key=lambda file: file.stat().st_mtime)
    return files[-1].parent if files else None


def read_runs(folders: Sequence[Path]) -> list[FinishedRun]:
    """All of them. Raises UserErrors, one for each that cannot be read."""
    problems, runs = Problems(), []
    for folder in folders:
        with problems.gathered():
            runs.append(read_run(folder))
    problems.raise_any()
    return runs


def read_run(folder: Path) -> FinishedRun:
    """A run from its folder; one without a summary from its curves. Raises UserError."""
    settings = flat(_mapping(folder / "config.yaml"))
    curves = read_curves(folder)
    if (folder / "run_summary.json").is_file():
        return _from_summary(folder, settings, _summary(folder / "run_summary.json"), curves)
    return _from_curves(folder, settings, curves)


# ---- a run that came to its end -----------------------------------------------------------------------------------


def _summary(file: Path) -> dict[str, Any]:
    summary = _mapping(file)
    ranks = summary.get("ranks")
    missing = [key for key in _NEEDED if key not in summary]
    if not missing and not (isinstance(ranks, list) and ranks and all(isinstance(rank, dict) for rank in ranks)):
        missing = ["ranks"]
    missing = missing or [f"ranks.{key}" for key in _NEEDED_OF_RANK if any(key not in rank for rank in ranks or ())]
    if missing:
        version = (summary.get("versions") or {}).get("unilab-fabric", "an unknown version")
        raise UserError(
            "run",
            file.parent,
            f"its run_summary.json, of {version}, has no {missing[0]}; allowed: a run of {__version__}",
        )
    if not all(rank["env_steps"] and rank["env_steps_per_sec"] for rank in summary["ranks"]):
        raise UserError("run", file.parent, f"it {summary['status']} before its first report: there are no times")
    return summary


def _from_summary(folder: Path, settings: Mapping[str, Any], summary: dict[str, Any], curves: Curves) -> FinishedRun:
    per_tick = summary["env_steps"] / summary["ticks"]
    topology, ranks = summary["topology"], summary["ranks"]
    times = []
    for rank in ranks:
        # a resumed run has made ticks before, and the phases are of this process only
        ticks = rank["env_steps"] * len(ranks) / per_tick
        tick_s = per_tick / len(ranks) / rank["env_steps_per_sec"]
        cores = _cores(rank["rank"], topology)
        times.append(
            RankTimes(
                name=f"rank {rank['rank']}",
                place=_place(rank["rank"], topology, cores),
                tick_s=tick_s,
                phase_s={name: s / ticks for name, s in rank["seconds"].items()},
                one_core=topology["accelerator"] == "cpu" and len(cores) == 1,
            )
        )
    return FinishedRun(
        name=folder.resolve().name,
        settings=settings,
        status=summary["status"],
        note=summary.get("reason") or "",
        on_cuda=topology["accelerator"] == "cuda",
        world_size=summary["world_size"],
        num_nodes=topology.get("num_nodes", 1),
        env_steps=summary["env_steps"],
        wall_s=summary["wall_s"],
        first_tick_s=summary.get("first_tick_s"),
        rate=curves.second_half(RATE) or summary["env_steps_per_sec"],
        updates_per_s=curves.second_half(UPDATES)
        or sum(rank["updates"] * rank["env_steps_per_sec"] / rank["env_steps"] for rank in ranks),
        cores=sum(map(len, topology.get("cpus") or ())) * topology.get("num_nodes", 1) or None,
        final_return=summary.get("mean_reward"),
        env_steps_per_tick=per_tick,
        versions=summary["versions"],
        ranks=tuple(times),
        curves=curves,
    )


def _cores(rank: int, topology: Mapping[str, Any]) -> Sequence[int]:
    blocks = topology.get("cpus") or ()
    local = rank % max(1, len(topology.get("devices") or ()))
    return blocks[local] if local < len(blocks) else ()


def _place(rank: int, topology: Mapping[str, Any], cores: Sequence[int]) -> str:
    if topology.get("num_nodes", 1) > 1:
        return f"machine {rank // len(topology['devices'])}"
    if not cores:
        return ""
    return f"core {cores[0]}" if len(cores) == 1 else f"cores {cores[0]}-{cores[-1]}"


# ---- a run without a summary --------------------------------------------------------------------------------------


def _from_curves(folder: Path, settings: Mapping[str, Any], curves: Curves) -> FinishedRun:
    """From the reports alone: their times are those of the slowest rank, phase by phase."""
    why = _why_no_summary(folder)
    rate = curves.second_half(RATE)
    devices = settings.get("training.devices")
    world_size = (len(devices) or 1) if isinstance(devices, list) else devices if isinstance(devices, int) else 1
    world_size *= settings.get("training.num_nodes", 1)
    num_envs = settings.get("task.num_envs")
    if rate is None or not isinstance(num_envs, int):
        raise UserError("run", folder, f"{why}, and no reports to look at instead")
    means = {name: curves.second_half(f"Perf/{name}_ms") for name in PHASES}
    return FinishedRun(
        name=folder.resolve().name,
        settings=settings,
        status="no summary",
        note=f"{why}; the times are from its reports: the slowest rank of each phase",
        on_cuda=settings.get("training.accelerator") == "cuda",
        world_size=world_size,
        num_nodes=settings.get("training.num_nodes", 1),
        env_steps=curves.env_steps[-1],
        wall_s=None,
        first_tick_s=None,
        rate=rate,
        updates_per_s=curves.second_half(UPDATES) or 0.0,
        cores=None,
        final_return=curves.last(RETURN),
        env_steps_per_tick=num_envs * world_size,
        versions={},
        ranks=(
            RankTimes(
                name="slowest" if world_size > 1 else "rank 0",
                tick_s=num_envs * world_size / rate,
                phase_s={name: ms / 1e3 for name, ms in means.items() if ms is not None},
            ),
        ),
        curves=curves,
    )


def _why_no_summary(folder: Path) -> str:
    failure = folder / "failure.json"
    reason = _mapping(failure).get("reason", "") if failure.is_file() else ""
    return (
        f"no run_summary.json: it failed: {reason}" if reason else "no run_summary.json: it was killed, or still runs"
    )


# ---- curves -------------------------------------------------------------------------------------------------------


def read_curves(folder: Path) -> Curves:
    """From TensorBoard's files or from `metrics.csv`; empty where the run has another logger."""
    rows = _csv_rows(folder / "metrics.csv") if (folder / "metrics.csv").is_file() else _event_rows(folder)
    steps = sorted(rows)
    return Curves(env_steps=steps, values=[rows[step] for step in steps])


def _csv_rows(file: Path) -> dict[int, dict[str, float]]:
    rows = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            if None not in row.values():  # a kill may have left half a row
                rows[int(row.pop("env_steps"))] = {tag: float(text) for tag, text in row.items() if text}
    return rows


def _event_rows(folder: Path) -> dict[int, dict[str, float]]:
    if not any(folder.glob("events.out.tfevents.*")):
        return {}
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    rows: dict[int, dict[str, float]] = {}
    for tag in events.Tags()["scalars"]:
        for event in events.Scalars(tag):
            rows.setdefault(event.step, {})[tag] = event.value
    return rows


def _mapping(file: Path) -> dict[str, Any]:
    """A JSON or YAML file that holds a mapping. Raises UserError."""
    try:
        found = json.loads(file.read_text()) if file.suffix == ".json" else yaml.safe_load(file.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        text = str(error).splitlines()[0]
        raise UserError("run", file.parent, f"its {file.name} cannot be read: {text}") from None
    if not isinstance(found, dict):
        raise UserError("run", file.parent, f"its {file.name} holds no mapping; allowed: the file that a run writes")
    return found
