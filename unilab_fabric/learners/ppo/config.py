"""Settings of PPO; loads neither torch nor RSL-RL."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar, Literal

from unilab_fabric.errors import UserError
from unilab_fabric.learners.learner import LearnerConfig, Storage
from unilab_fabric.spaces import TaskSpec

if TYPE_CHECKING:
    import torch

    from unilab_fabric.learners.ppo.learner import PPOLearner
    from unilab_fabric.parallel.reduce import Ranks


@dataclass(frozen=True, kw_only=True)
class PPO(LearnerConfig):
    """Proximal policy optimisation by RSL-RL (rsl-rl-lib): its algorithm, its networks and its rollout storage."""

    takes_turns: ClassVar[bool] = True
    auto_precision: ClassVar[str] = "32-true"
    discount: float = 0.99
    """Discount per control step (gamma)."""
    num_steps_per_env: int = 24
    """Ticks of one iteration: rollout, then updates."""
    num_learning_epochs: int = 5
    """Passes over a rollout."""
    num_mini_batches: int = 4
    """Parts into which each pass cuts it, one optimiser step each."""
    lam: float = 0.95
    """Decay of the advantage estimator (lambda of GAE)."""
    clip_param: float = 0.2
    """How far the probability ratio, and the value, may move before the objective stops rewarding it."""
    value_loss_coef: float = 1.0
    """Weight of the value's loss."""
    use_clipped_value_loss: bool = True
    """Clip the value's change as the ratio's."""
    entropy_coef: float = 0.01
    """Weight of the entropy bonus."""
    learning_rate: float = 1e-3
    """Learning rate at the start."""
    schedule: Literal["adaptive", "fixed"] = "adaptive"
    """adaptive moves the learning rate to hold the policy's change near `desired_kl`."""
    desired_kl: float = 0.01
    """Kullback-Leibler divergence of an update at which the adaptive rate aims."""
    max_grad_norm: float = 1.0
    """Norm to which the gradients of actor and critic are clipped, each on its own."""
    normalize_advantage_per_mini_batch: bool = False
    """Normalise advantages in each mini-batch instead of once over the rank's rollout."""
    actor_hidden: tuple[int, ...] = (512, 256, 128)
    """Hidden widths of the actor."""
    critic_hidden: tuple[int, ...] = (512, 256, 128)
    """Hidden widths of the critic."""
    activation: Literal["elu", "selu", "relu", "lrelu", "tanh", "gelu", "swish", "mish"] = "elu"
    """Activation of both."""
    init_std: float = 1.0
    """Standard deviation of the actions at the start, in the policy's units."""
    std_type: Literal["scalar", "log"] = "scalar"
    """What is learned: the standard deviation or its logarithm; one for each action, the same in every state."""
    normalize_observations: bool = True
    """Normalise observations by running mean and standard deviation, part of the policy."""
    symmetry: bool = False
    """Add to each mini-batch its left-right mirror image; needs a task that says how."""
    start_from: str | None = None
    """A file that RSL-RL has written (model_*.pt): a new run starts from its weights, optimiser and normaliser."""

    @property
    def ticks_per_step(self) -> int:
        """A run stops, and is saved, between iterations."""
        return self.num_steps_per_env

    @property
    def steps_per_iteration(self) -> int:
        """Optimiser steps of one iteration."""
        return self.num_learning_epochs * self.num_mini_batches

    def problems(self, num_envs: int) -> list[UserError]:
        """Settings that cannot work."""
        found = super().problems(num_envs)

        def require(holds: bool, name: str, allowed: str) -> None:
            if not holds:
                found.append(UserError(f"learner.{name}", self.__dict__[name], f"allowed: {allowed}"))

        for name in ("actor_hidden", "critic_hidden"):
            widths = self.__dict__[name]
            require(len(widths) > 0 and min(widths, default=0) > 0, name, "one or more positive widths")
        for name in ("num_steps_per_env", "num_learning_epochs", "num_mini_batches"):
            require(self.__dict__[name] >= 1, name, "1 or more")
        for name in ("learning_rate", "clip_param", "desired_kl", "max_grad_norm", "init_std"):
            require(0 < self.__dict__[name] < math.inf, name, "more than 0")
        for name in ("entropy_coef", "value_loss_coef"):
            require(0 <= self.__dict__[name] < math.inf, name, "0 or more")
        for name in ("discount", "lam"):
            require(0 <= self.__dict__[name] <= 1, name, "0 to 1")
        rows = num_envs * self.num_steps_per_env
        require(
            1 <= self.num_mini_batches <= rows // 2,
            "num_mini_batches",
            f"1 to {rows // 2}, so that the {rows} transitions of an iteration give each two or more",
        )
        return found

    def storage(self, spec: TaskSpec) -> Storage:
        """The rollout: rows of float32 with both observations, action, its mean and std, and seven numbers."""
        row = 4 * (spec.actor_size + spec.critic_size + 3 * spec.action_size + 7)
        return Storage(
            name="rollout",
            setting="num_steps_per_env",
            ticks=self.num_steps_per_env,
            bytes=self.num_steps_per_env * spec.num_envs * row,
            bytes_per_tick=spec.num_envs * row,
            least_ticks=1,
        )

    def memory_bytes(self, spec: TaskSpec, precision: str) -> int:
        """See LearnerConfig: four tensors of the size of the parameters, and what an update keeps of a mini-batch."""
        actor = _parameters(spec.actor_size, self.actor_hidden, spec.action_size)
        critic = _parameters(spec.critic_size, self.critic_hidden, 1)
        rows = spec.num_envs * self.num_steps_per_env // self.num_mini_batches * (2 if self.symmetry else 1)
        kept = spec.actor_size + spec.critic_size + 5 * spec.action_size
        kept += 3 * (sum(self.actor_hidden) + sum(self.critic_hidden))
        return 4 * (4 * (actor + critic) + rows * kept)

    def sizes(self, num_envs: int) -> list[tuple[str, int]]:
        """See LearnerConfig."""
        rows = num_envs * self.num_steps_per_env
        return [("transitions an iteration", rows), ("mini-batch size", rows // self.num_mini_batches)]

    def work(self) -> str:
        """See LearnerConfig."""
        return f"an iteration is {self.num_steps_per_env} of them, and {self.steps_per_iteration} optimiser steps"

    def build(
        self,
        spec: TaskSpec,
        device: "torch.device",
        precision: str,
        ranks: "Ranks",
        seed: int,
        total_updates: int,
    ) -> "PPOLearner":
        """The learner on its device; raises UserErrors where the task lacks what the settings ask for."""
        from unilab_fabric.learners.ppo.learner import PPOLearner

        return PPOLearner(self, spec, device, precision, ranks, seed)


def _parameters(inputs: int, hidden: tuple[int, ...], outputs: int) -> int:
    widths = (inputs, *hidden, outputs)
    return sum((a + 1) * b for a, b in pairwise(widths))
