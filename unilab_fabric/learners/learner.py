"""What the runner may ask of any learner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from unilab_fabric.checkpoints import Layouts
from unilab_fabric.errors import UserError, UserErrors
from unilab_fabric.spaces import TaskSpec

if TYPE_CHECKING:  # a learner's configuration is read before torch is loaded
    import torch
    from torch import Tensor

    from unilab_fabric.learners.skips import SkippedSteps
    from unilab_fabric.parallel.reduce import Ranks


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Transitions drawn from replay, float32 on the learner's device unless said otherwise; B is the batch size."""

    actor: "Tensor"  # (B, actor observation)
    critic: "Tensor"  # (B, critic observation)
    action: "Tensor"  # (B, actions), in the environment's units
    reward: "Tensor"  # (B,), sum of discounted rewards over `steps`
    next_actor: "Tensor"  # (B, actor observation), the true one: after a time-out not that of the next episode
    next_critic: "Tensor"  # (B, critic observation)
    terminated: "Tensor"  # (B,) bool; a time-out is not a termination
    discount: "Tensor"  # (B,), gamma ** (rewards summed)


class Replicated(Protocol):
    """What every learner holds, of whatever kind: reported, compared, saved and loaded by the loop."""

    replicated: Mapping[str, "Tensor"]
    """The live tensors of the replicated state by group name (`critic`, `critic/exp_avg`, `normaliser/mean`, ...):
    broadcast at the start, compared by the replica check, saved and loaded in place."""
    layouts: Layouts
    """For each flat tensor of parameters: name, shape and offset of what lies in it; a checkpoint must agree."""
    local: Mapping[str, "Tensor"]
    """The live tensors of the rank's own state besides generators, by name; saved in its part of a checkpoint."""
    metric_names: tuple[str, ...]
    """Tags of `metrics`, fixed before the first tick."""
    metrics: "Tensor"
    """(len(metric_names), 2) float64 on the device: sum and count since the runner last set it to zero."""
    skipped: "SkippedSteps"
    """Optimiser steps left out for a non-finite gradient, part of the replicated state."""
    generators: Mapping[str, "torch.Generator"]
    """The rank's own random generators by name, for checkpoints."""

    def policy(self) -> "torch.nn.Module":
        """The deterministic policy, normaliser inside: (n, actor observation) -> (n, actions)."""
        ...


class Learner(Replicated, Protocol):
    """All that the off-policy runner asks of an algorithm."""

    updates_per_tick: int
    """Critic updates in one cycle."""
    period: int
    """Updates after which what an update does repeats, as the actor's do; the first of a tick may differ besides."""
    batch_size: int
    """Transitions of one update, per rank."""

    def act(self, observation: "Tensor") -> "Tensor":
        """Sampled actions for (num_envs, actor observation), (num_envs, actions) in the environment's units."""
        ...

    def observe(self, reward: "Tensor", ended: "Tensor") -> None:
        """Takes note of a tick as it goes into replay: rewards (num_envs,), environments (K,) whose episodes ended."""
        ...

    def update(self, batch: Batch, index: int) -> None:
        """One critic update and what belongs to it; may be recorded into a graph (docs/cuda-graphs.md).

        So it reads nothing back, and takes from Python nothing that changes but `index`: that counts updates from the
        start of the run (tick * updates_per_tick + place in the cycle), give or take whole periods. The batch may be
        overwritten by the next draw.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Storage:
    """Where a rank keeps transitions: how much of it there is, and how large it may get."""

    name: str
    """What it is called: replay, rollout."""
    setting: str
    """The learner's setting that gives its length."""
    ticks: int
    """Its length."""
    bytes: int
    """Its memory [bytes]."""
    bytes_per_tick: int
    """What one more tick takes."""
    least_ticks: int
    """The shortest one that the other settings allow."""


@dataclass(frozen=True, kw_only=True)
class LearnerConfig:
    """What every learner's configuration has; `learner:` in a config names a subclass of it."""

    discount: float = 0.97
    """Discount per control step (gamma)."""

    takes_turns: ClassVar[bool] = False
    """Whether physics stands still while the learner updates, so that each may have all cores of the rank."""
    job_sizes: ClassVar[tuple[str, ...]] = ()
    """Settings that the ranks divide among them where `training.batch` is job, besides the environments."""
    auto_precision: ClassVar[str] = "auto"
    """What `training.precision: auto` means to this learner; auto leaves it to the device."""

    @property
    def ticks_per_step(self) -> int:
        """Ticks between two moments at which a run may stop or be saved."""
        return 1

    def check(self, num_envs: int) -> None:
        """Raises UserErrors where the settings cannot serve `num_envs` environments of a rank."""
        problems = self.problems(num_envs)
        if problems:
            raise UserErrors(problems)

    def problems(self, num_envs: int) -> list[UserError]:
        """What `check` raises; a learner adds its own."""
        return []

    def storage(self, spec: TaskSpec) -> Storage:
        """Where a rank keeps its transitions."""
        raise NotImplementedError

    def memory_bytes(self, spec: TaskSpec, precision: str) -> int:
        """Memory [bytes] of the learner of one rank without its storage: its state, and what an update holds at once.

        An estimate from the sizes alone; `precision` is as in the configuration. A learner that does not say counts
        for nothing.
        """
        return 0

    def sizes(self, num_envs: int) -> list[tuple[str, int]]:
        """What the banner tells per rank and for the job."""
        raise NotImplementedError

    def work(self) -> str:
        """What the banner says about the updates."""
        raise NotImplementedError

    def build(
        self,
        spec: TaskSpec,
        device: "torch.device",
        precision: str,
        ranks: "Ranks",
        seed: int,
        total_updates: int,
    ) -> Replicated:
        """The learner on its device.

        `precision` is resolved (32-true or bf16-mixed), `seed` is the rank's, `total_updates` is what the rank will do
        over the whole run: the horizon of learning-rate schedules.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class OffPolicyConfig(LearnerConfig):
    """What every off-policy learner's configuration has."""

    batch_size: int = 8192
    """Transitions of one critic update, per rank."""
    updates_per_tick: int = 8
    """Critic updates in one tick."""
    replay_ticks: int = 1024
    """Ticks kept in each rank's replay; a tick holds one transition of each of the rank's environments."""
    learning_starts: int = 10
    """Ticks in replay before the first update."""
    n_step: int = 1
    """Rewards summed before the bootstrap."""

    job_sizes: ClassVar[tuple[str, ...]] = ("batch_size",)

    def problems(self, num_envs: int) -> list[UserError]:
        """See LearnerConfig."""
        problems = super().problems(num_envs)
        if self.replay_ticks * num_envs < self.batch_size:
            problems.append(
                UserError(
                    "learner.replay_ticks",
                    self.replay_ticks,
                    f"allowed: {-(-self.batch_size // num_envs)} or more, so that {num_envs} environments fill a batch "
                    f"of {self.batch_size}",
                )
            )
        if self.learning_starts * num_envs < self.batch_size:
            problems.append(
                UserError(
                    "learner.batch_size",
                    self.batch_size,
                    f"allowed: {self.learning_starts * num_envs} or less, the transitions that {num_envs} environments "
                    f"give in learner.learning_starts = {self.learning_starts} ticks",
                )
            )
        if not 1 <= self.learning_starts <= self.replay_ticks:
            problems.append(
                UserError("learner.learning_starts", self.learning_starts, f"allowed: 1 to {self.replay_ticks} ticks")
            )
        return problems

    def storage(self, spec: TaskSpec) -> Storage:
        """The replay: rows of float32 with both observations once, action, reward, flag, and a 64-bit index beside."""
        row = 4 * (spec.actor_size + spec.critic_size + spec.action_size + 2) + 8
        return Storage(
            name="replay",
            setting="replay_ticks",
            ticks=self.replay_ticks,
            bytes=(self.replay_ticks + 1) * spec.num_envs * row,
            bytes_per_tick=spec.num_envs * row,
            least_ticks=max(self.learning_starts, -(-self.batch_size // spec.num_envs)),
        )

    def sizes(self, num_envs: int) -> list[tuple[str, int]]:
        """See LearnerConfig."""
        return [
            ("batch size", self.batch_size),
            ("before the first update", self.learning_starts * num_envs),
            ("transitions in replay", self.replay_ticks * num_envs),
        ]

    def work(self) -> str:
        """See LearnerConfig."""
        return f"critic updates in each: {self.updates_per_tick}"

    def build(
        self,
        spec: TaskSpec,
        device: "torch.device",
        precision: str,
        ranks: "Ranks",
        seed: int,
        total_updates: int,
    ) -> Learner:
        """See LearnerConfig."""
        raise NotImplementedError
