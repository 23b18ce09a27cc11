"""On-policy training: one step is an iteration, a rollout of several ticks and then the updates on it."""

from typing import Any

from typing_extensions import override

from unilab_fabric.learners.ppo.learner import PPOLearner
from unilab_fabric.loop.runner import Runner
from unilab_fabric.loop.transfer import Handover


class OnPolicyRunner(Runner):
    """One rank. Physics and inference take turns, as each action needs the observation before it; storing a transition
    goes on beside physics, and updates begin when the rollout is complete."""

    def __init__(self, *, learner: PPOLearner, **parts: Any) -> None:
        """`parts` are those of `Runner`."""
        super().__init__(learner=learner, **parts)
        self._learner = learner
        self.ticks_per_step = learner.config.ticks_per_step

    @override
    def advance(self) -> None:
        for _ in range(self.ticks_per_step):
            filled = self._wait_filled()
            with self._timed("commit"):
                handover = self._transfer.take(filled)
                self._record(handover)
            with self._timed("act"):
                self._act(self._learner.act(handover.actor))  # physics runs from here ...
            with self._timed("commit"):
                self._learner.keep(handover.actor, handover.critic)  # ... while what was decided on is stored
            self._end_tick(filled, 0)
        handover = self._transfer.take(self._wait_filled())
        self._record(handover)
        with self._timed("update"), self._ranks.bounded("the updates of PPO"):
            before = self._learner.updates
            self._learner.learn(handover.actor, handover.critic)
        self._reporter.count_updates(self._learner.updates - before)

    def _record(self, handover: Handover) -> None:
        """What followed the newest action; nothing where an iteration begins, as the one before has recorded it."""
        if self._learner.stored:
            self._learner.record(handover.reward, handover.terminated, handover.ended_env, handover.final_critic)
