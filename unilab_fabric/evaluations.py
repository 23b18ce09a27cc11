"""`evaluations.jsonl` of a run: what its checkpoints were found to be worth, one line each, and which is the best."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "evaluations.jsonl"


def read_evaluations(run_folder: Path) -> list[dict[str, Any]]:
    """The evaluations of a run, the oldest first; half a line of a killed run is left out."""
    try:
        lines = (run_folder / FILE).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def add_evaluation(run_folder: Path, result: Mapping[str, Any]) -> None:
    """Adds one, as `evaluation.evaluate` returns it."""
    with (run_folder / FILE).open("a") as file:
        file.write(json.dumps(result) + "\n")


def forget_evaluations(run_folder: Path, after_tick: int) -> None:
    """Drops those of checkpoints after `after_tick`: a run that continues from there has left their course."""
    kept = [one for one in read_evaluations(run_folder) if one["tick"] <= after_tick]
    part = run_folder / f"{FILE}.partial"
    part.write_text("".join(json.dumps(one) + "\n" for one in kept))
    os.replace(part, run_folder / FILE)


def best_evaluation(run_folder: Path) -> dict[str, Any] | None:
    """The evaluation with the highest mean return, of the checkpoints that are still there; the oldest of equals."""
    judged = [
        one
        for one in read_evaluations(run_folder)
        if math.isfinite(mean_return(one)) and (run_folder / "checkpoints" / one["checkpoint"]).is_dir()
    ]
    return max(judged, key=mean_return, default=None)


def mean_return(evaluation: Mapping[str, Any]) -> float:
    """Mean return of an evaluation's episodes."""
    mean: float = evaluation["figures"]["return"]["mean"]
    return mean
