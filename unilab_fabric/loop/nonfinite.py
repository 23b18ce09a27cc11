"""What a run does about values that are not finite in its updates: it counts, looks for where they are, and gives up.

Each step with such a gradient has already been left out, by all ranks alike (learners/skips.py), before anybody looks
here, at the reports.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from unilab_fabric.learners.learner import Replicated
from unilab_fabric.learners.skips import Skips
from unilab_fabric.loop.collector import NONFINITE
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.replica import nonfinite_groups

_MOST_DUMPS = 20
_MOST_ROWS = 50


class NonfiniteUpdates(RuntimeError):
    """Training cannot go on: the parameters themselves are not finite, or no step has been taken for too long."""


class NonfiniteWatch:
    """Looks at the skipped steps of a run; every rank has one and calls it at the same ticks."""

    def __init__(
        self,
        learner: Replicated,
        stored: Callable[[int], list[dict[str, object]]],
        ranks: Ranks,
        run_folder: Path,
        most_in_row: int,
    ) -> None:
        """What is found goes into the run's `nonfinite/`; `most_in_row` steps left out in a row are too many.

        `stored` describes up to so many stored values that are not finite, as `Replay.nonfinite` does.
        """
        self._learner = learner
        self._stored = stored
        self._ranks = ranks
        self._folder = run_folder / NONFINITE
        self._most_in_row = most_in_row
        self._before = learner.skipped.read()
        self._dumps = 0

    def look(self, tick: int) -> int:
        """The steps skipped since the start of the run. Raises NonfiniteUpdates, on the ranks concerned."""
        skips = self._learner.skipped.read()
        if skips.total > self._before.total:
            self._act(tick, skips)
        self._before = skips
        return skips.total

    def _act(self, tick: int, skips: Skips) -> None:
        culprits = self._culprits(skips)
        text = (
            f"tick {tick}: {skips.total - self._before.total} optimiser steps were left out since the last report, "
            f"for a gradient that is not finite{_of_ranks(culprits)}"
        )
        if self._ranks.rank == 0:
            print(f"warning: {text}", file=sys.stderr, flush=True)
        if self._ranks.rank in culprits or not culprits:
            self._find(tick, skips)
        worst = max(skips.in_row, key=lambda optimiser: skips.in_row[optimiser])
        if skips.in_row[worst] >= self._most_in_row:
            raise NonfiniteUpdates(
                f"{text}; {skips.in_row[worst]} steps of the {worst} in a row, and training.max_skipped_updates is "
                f"{self._most_in_row}"
            )

    def _culprits(self, skips: Skips) -> Sequence[int]:
        """Ranks whose own gradient was not finite since the last look."""
        changed = [
            rank
            for optimiser, counts in skips.by_rank.items()
            for rank, (now, before) in enumerate(zip(counts, self._before.by_rank[optimiser], strict=True))
            if now > before
        ]
        return sorted(set(changed))

    def _find(self, tick: int, skips: Skips) -> None:
        """Where this rank holds values that are not finite; raises where these are its replicated state."""
        groups = nonfinite_groups(self._learner.replicated)
        figures = {
            "kind": "gradient",
            "tick": tick,
            "rank": self._ranks.rank,
            "skipped_updates": skips.total,
            "in_row": dict(skips.in_row),
            "replicated_state": groups,
            "replay": self._stored(_MOST_ROWS),
        }
        self._dump(f"rank-{self._ranks.rank}-tick-{tick:09d}-gradient.json", figures)
        if groups:
            raise NonfiniteUpdates(f"replicated state is not finite on rank {self._ranks.rank}: {', '.join(groups)}")

    def _dump(self, name: str, figures: Mapping[str, object]) -> None:
        if self._dumps == _MOST_DUMPS:
            return
        self._dumps += 1
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / name).write_text(json.dumps(figures, indent=2) + "\n")
        except OSError as error:
            print(f"warning: {self._folder / name} could not be written: {error}", file=sys.stderr)


def _of_ranks(ranks: Sequence[int]) -> str:
    return f" on rank {', '.join(map(str, ranks))}" if ranks else ""
