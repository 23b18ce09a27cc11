"""Settings of FastSAC; loads neither torch nor Lightning."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from unilab_fabric.errors import UserError
from unilab_fabric.learners.learner import OffPolicyConfig
from unilab_fabric.spaces import TaskSpec

if TYPE_CHECKING:
    import torch

    from unilab_fabric.learners.learner import Learner
    from unilab_fabric.parallel.reduce import Ranks


def _parameters(inputs: int, hidden: tuple[int, ...], outputs: int) -> int:
    """Parameters of one perceptron with a LayerNorm behind each hidden layer."""
    widths = (inputs, *hidden)
    return sum((a + 3) * b for a, b in zip(widths, hidden, strict=False)) + (widths[-1] + 1) * outputs


@dataclass(frozen=True, kw_only=True)
class FastSAC(OffPolicyConfig):
    """Soft actor-critic for thousands of environments: LayerNorm networks, categorical critics, a delayed actor."""

    actor_hidden: tuple[int, ...] = (512, 256, 128)
    """Hidden widths of the actor."""
    critic_hidden: tuple[int, ...] = (768, 384, 192)
    """Hidden widths of each critic."""
    num_critics: int = 2
    """Critics; each has its own target, and the actor follows their mean."""
    atoms: int = 101
    """Atoms of the return's distribution."""
    v_min: float = -20.0
    """Lowest discounted return that the critics can express; with rewards times the control step -20 to 20 fits."""
    v_max: float = 20.0
    """Highest discounted return that the critics can express."""
    tau: float = 0.125
    """Share of the critic that the target critic takes on at each update."""
    actor_learning_rate: float = 3e-4
    """Learning rate of the actor at the start."""
    critic_learning_rate: float = 3e-4
    """Learning rate of the critics at the start."""
    temperature_learning_rate: float = 3e-4
    """Learning rate of the log temperature at the start."""
    final_lr_fraction: float = 1.0
    """All three learning rates fall linearly to this fraction of their start over the run; 1 keeps them constant."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""
    weight_decay: float = 0.001
    """Decoupled weight decay of actor and critics; the temperature has none."""
    max_grad_norm: float = 0.0
    """Norm to which the gradients of the actor and of the critics are clipped; 0 does not clip."""
    temperature: float = 0.001
    """Entropy temperature at the start."""
    target_entropy_ratio: float = 0.0
    """Target entropy is minus this times the number of actions, in nats, in the environment's action units."""
    actor_every: int = 4
    """Critic updates per actor update."""
    normalize_observations: bool = True
    """Normalise observations by running mean and standard deviation, part of the policy."""
    symmetry: bool = False
    """Reflect half of each batch left to right; needs a task that says how."""
    random_ticks: int = 0
    """Ticks at the start of a run with uniform random actions."""
    kernels: Literal["auto", "off"] = "auto"
    """auto compiles a small C file once for fused CPU kernels where a compiler is found; off computes the same in
    PyTorch."""

    def memory_bytes(self, spec: TaskSpec, precision: str) -> int:
        """See OffPolicyConfig. The factors of the second part are those of tests/learners/test_memory.py."""
        actor = _parameters(spec.actor_size, self.actor_hidden, 2 * spec.action_size)
        inputs = spec.critic_size + spec.action_size
        critic = self.num_critics * _parameters(inputs, self.critic_hidden, self.atoms)
        state = 4 * actor + 5 * critic  # values, gradient and two moments; the critics' targets
        row = self.num_critics * (4.4 * sum(self.critic_hidden) + 6 * self.atoms) + 2 * inputs
        narrow = 0.72 if precision in ("auto", "bf16-mixed") else 1.0
        return round(4 * (state + narrow * row * self.batch_size))

    def problems(self, num_envs: int) -> list[UserError]:
        """Settings that cannot work, those of the base included."""
        found = super().problems(num_envs)

        def require(holds: bool, name: str, allowed: str) -> None:
            if not holds:
                found.append(UserError(f"learner.{name}", self.__dict__[name], f"allowed: {allowed}"))

        for name in ("actor_hidden", "critic_hidden"):
            widths = self.__dict__[name]
            require(len(widths) > 0 and min(widths, default=0) > 0, name, "one or more positive widths")
        for name in ("num_critics", "actor_every"):
            require(self.__dict__[name] >= 1, name, "1 or more")
        for name in ("actor_learning_rate", "critic_learning_rate", "temperature_learning_rate", "temperature"):
            require(0 < self.__dict__[name] < math.inf, name, "more than 0")
        for name in ("weight_decay", "max_grad_norm", "random_ticks"):
            require(0 <= self.__dict__[name] < math.inf, name, "0 or more")
        require(self.atoms >= 2, "atoms", "2 or more")
        require(self.v_min < self.v_max, "v_min", f"less than learner.v_max = {self.v_max}")
        require(0 < self.tau <= 1, "tau", "more than 0, at most 1")
        require(0 <= self.final_lr_fraction <= 1, "final_lr_fraction", "0 to 1")
        require(all(0 <= beta < 1 for beta in self.betas), "betas", "0 or more, less than 1")
        return found

    def build(
        self,
        spec: TaskSpec,
        device: "torch.device",
        precision: str,
        ranks: "Ranks",
        seed: int,
        total_updates: int,
    ) -> "Learner":
        """The learner on its device; raises UserErrors where the task lacks what the settings ask for."""
        from unilab_fabric.learners.fast_sac.learner import FastSACLearner

        return FastSACLearner(self, spec, device, precision, ranks, seed, total_updates)
