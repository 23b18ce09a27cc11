"""What a finished run says of itself: the series of its event files, and `run_summary.json`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from shared.jobs import Unmeasured

SUMMARY = "run_summary.json"
STEPS, UPDATES, RETURN = "Perf/env_steps_per_sec", "Perf/updates_per_sec", "Train/mean_reward"
LEAST_REPORTS = 8


@dataclass(frozen=True)
class Series:
    """One tag."""

    values: list[float]
    times: list[float]
    """Of each value, in seconds [s] since the epoch."""

    @property
    def steady(self) -> float:
        """Mean of the second half."""
        half = self.values[len(self.values) // 2 :]
        return sum(half) / len(half)


def series(folder: Path) -> dict[str, Series]:
    """All tags of a run's event files. Raises Unmeasured where there is no such file."""
    if not any(folder.glob("events.out.tfevents.*")):
        raise Unmeasured(f"there is no event file in {folder}")
    files = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {
        tag: Series([event.value for event in events], [event.wall_time for event in events])
        for tag in files.Tags()["scalars"]
        if (events := files.Scalars(tag))
    }


def steady_rate(found: dict[str, Series], tag: str, folder: Path) -> float:
    """The mean of the second half of a tag. Raises Unmeasured where there is too little of it, or it is no rate."""
    count = len(found[tag].values) if tag in found else 0
    if count < LEAST_REPORTS:
        raise Unmeasured(f"{tag} has {count} reports in the event files of {folder}; {LEAST_REPORTS} are needed")
    rate = found[tag].steady
    if not 0 < rate < float("inf"):
        raise Unmeasured(f"{tag} is {rate} in the event files of {folder}")
    return rate


def summary(folder: Path) -> dict[str, Any]:
    """`run_summary.json` of a completed run. Raises Unmeasured for any other."""
    file = folder / SUMMARY
    if not file.is_file():
        raise Unmeasured(f"{file} is missing")
    try:
        figures: dict[str, Any] = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise Unmeasured(f"{file} is no JSON: {error}") from None
    if figures.get("status") != "completed":
        raise Unmeasured(f"the run is {figures.get('status')}, not completed, says {file}")
    return figures


def by_rank(figures: dict[str, Any], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """The part of each rank. Raises Unmeasured where one is missing or has done nothing."""
    found = {one["rank"]: one for one in figures["ranks"]}
    for rank in range(ranks):
        if rank not in found:
            raise Unmeasured(f"rank {rank} of {ranks} is missing in {folder / SUMMARY}")
        for count in ("env_steps", "updates"):
            if not found[rank][count]:
                raise Unmeasured(f"rank {rank} has 0 {count} in {folder / SUMMARY}")
    if len(found) != ranks:
        raise Unmeasured(f"{folder / SUMMARY} has {len(found)} ranks, and {ranks} were asked for")
    return [found[rank] for rank in range(ranks)]
