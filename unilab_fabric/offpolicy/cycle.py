"""The block of learner updates that runs while physics steps: eager, or replayed from a graph.

Both ways run the same code. Everything that changes from tick to tick is a tensor on the device (where replay begins
and how much it holds, step counts, generators); all that Python sees is the place of an update within its period.
"""

import math
from collections.abc import Iterator

from torch import Tensor

from unilab_fabric.learners.learner import Learner
from unilab_fabric.offpolicy.graphs import GraphedBlock
from unilab_fabric.offpolicy.replay import Replay


class Cycle:
    """`updates_per_tick` updates on freshly drawn batches, once replay holds `learning_starts` ticks."""

    def __init__(
        self, learner: Learner, replay: Replay, *, learning_starts: int, graphed: GraphedBlock | None = None
    ) -> None:
        """`graphed` replays the block; without it each tick runs it anew."""
        self._learner = learner
        self._replay = replay
        self._learning_starts = max(learning_starts, replay.n_step)
        self._graphed = graphed
        self._period = math.lcm(learner.period, learner.updates_per_tick)
        self.updates = 0
        """Updates since the start of the run; a resumed run sets it."""

    def run(self) -> int:
        """The updates of one tick; returns how many there were."""
        if self._replay.filled_ticks < self._learning_starts:
            return 0
        count = self._learner.updates_per_tick
        first = self.updates - self.updates % count  # a resumed run may do another number of them in a tick
        if self._graphed is None:
            self._updates_from(first)
        else:
            firsts = range(0, self._period, count)
            self._graphed.run(first % self._period, firsts, self._updates_from, self._outliving())
        self.updates += count
        return count

    def close(self) -> None:
        """Lets go of the graphs, if there are any; before the process group is left."""
        if self._graphed is not None:
            self._graphed.close()

    def _updates_from(self, first: int) -> None:
        """Updates `first`, `first` + 1, ... of one tick; `first` counts from any start of a period."""
        for index in range(first, first + self._learner.updates_per_tick):
            self._learner.update(self._replay.sample(self._learner.batch_size), index)

    def _outliving(self) -> Iterator[Tensor]:
        yield from self._learner.replicated.values()
        yield from self._learner.local.values()
        yield self._learner.metrics
        yield from self._replay.tensors()
