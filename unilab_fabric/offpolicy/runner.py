"""Off-policy training: one tick is one step of all environments beside one cycle of updates."""

from typing import Any

from typing_extensions import override

from unilab_fabric.learners.learner import Learner
from unilab_fabric.loop.runner import Runner
from unilab_fabric.offpolicy.cycle import Cycle
from unilab_fabric.offpolicy.replay import Replay


class OffPolicyRunner(Runner):
    """One rank; see `advance` for the order of a tick, which no timing changes."""

    def __init__(self, *, learner: Learner, replay: Replay, cycle: Cycle, **parts: Any) -> None:
        """`parts` are those of `Runner`."""
        super().__init__(learner=learner, **parts)
        self._learner = learner
        self._replay = replay
        self._cycle = cycle

    @override
    def advance(self) -> None:
        filled = self._wait_filled()
        with self._timed("commit"):
            handover = self._transfer.take(filled)
            if self._replay.streaming:
                self._replay.commit(handover)
                self._learner.observe(handover.reward, handover.ended_env)
            else:
                self._replay.begin(self.tick, handover)
        with self._timed("act"):
            self._act(self._learner.act(handover.actor))  # physics runs from here ...
        with self._timed("update"):
            updates = self._cycle.run()  # ... while we learn from what came before
        self._end_tick(filled, updates)

    @override
    def close(self) -> None:
        """Lets go of graphs and slots."""
        self._cycle.close()
        super().close()
