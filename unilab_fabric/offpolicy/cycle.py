"""The block of learner updates that runs while physics steps."""

from unilab_fabric.learners.learner import Learner
from unilab_fabric.offpolicy.replay import Replay


class Cycle:
    """`updates_per_tick` updates on freshly drawn batches, once replay holds `learning_starts` ticks."""

    def __init__(self, learner: Learner, replay: Replay, *, learning_starts: int) -> None:
        self._learner = learner
        self._replay = replay
        self._learning_starts = max(learning_starts, replay.n_step)
        self.updates = 0
        """Updates since the start of the run; a resumed run sets it."""

    def run(self) -> int:
        """The updates of one tick; returns how many there were."""
        if self._replay.filled_ticks < self._learning_starts:
            return 0
        for _ in range(self._learner.updates_per_tick):
            self._learner.update(self._replay.sample(self._learner.batch_size), self.updates)
            self.updates += 1
        return self._learner.updates_per_tick
