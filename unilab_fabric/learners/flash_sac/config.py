"""Settings of FlashSAC; loads neither torch nor Lightning."""

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


def _parameters(inputs: int, width: int, blocks: int, outputs: int) -> int:
    """Parameters of one network."""
    block = 8 * width**2 + 10 * width  # to four times the width and back, a norm behind each
    return 2 * inputs + inputs * width + blocks * block + width + (width + 1) * outputs


@dataclass(frozen=True, kw_only=True)
class FlashSAC(OffPolicyConfig):
    """Soft actor-critic with few updates, large batches and bounded norms: BatchNorm, RMSNorm, unit-norm weights."""

    batch_size: int = 2048
    """Transitions of one critic update, per rank."""
    updates_per_tick: int = 2
    """Critic updates in one tick."""
    replay_ticks: int = 2048
    """Ticks kept in each rank's replay; a tick holds one transition of each of the rank's environments."""
    learning_starts: int = 50
    """Ticks in replay before the first update; until then actions are uniform and random."""
    actor_width: int = 128
    """Width of the actor's blocks; inside they are four times as wide."""
    critic_width: int = 256
    """Width of each critic's blocks."""
    blocks: int = 2
    """Inverted residual blocks of the actor and of each critic."""
    atoms: int = 101
    """Atoms of the scaled return's distribution."""
    max_return: float = 5.0
    """Rewards are scaled so that discounted returns lie within plus and minus this, the range of the atoms."""
    tau: float = 0.01
    """Share of the critics that the target critics take on at each update."""
    learning_rate: float = 3e-4
    """Learning rate at the start, of all three optimisers."""
    final_learning_rate: float = 1.5e-4
    """Learning rate after as many steps as the run has critic updates; it falls like half a cosine."""
    warm_up_fraction: float = 0.0
    """Share of the run's critic updates over which the learning rate rises linearly from 0."""
    temperature: float = 0.01
    """Entropy temperature at the start."""
    target_std: float = 0.15
    """Standard deviation, of actions in -1 to 1, of the Gaussian whose entropy is the target."""
    actor_every: int = 2
    """Critic updates per actor update."""
    noise_exponent: float = 2.0
    """Exploration noise is held for k ticks with a probability that falls like k to minus this."""
    noise_longest: int = 16
    """Most ticks for which it is held; 1 draws it anew at each tick."""
    symmetry: bool = False
    """Reflect half of each batch left to right; needs a task that says how."""
    kernels: Literal["auto", "off"] = "auto"
    """auto compiles a small C file once for fused CPU kernels where a compiler is found; off computes the same in
    PyTorch."""

    def memory_bytes(self, spec: TaskSpec, precision: str) -> int:
        """See OffPolicyConfig. The factors of the second part are those of tests/learners/test_memory.py."""
        actor = _parameters(spec.actor_size, self.actor_width, self.blocks, 2 * spec.action_size)
        critics = 2 * _parameters(spec.critic_size + spec.action_size, self.critic_width, self.blocks, self.atoms)
        state = 4 * actor + 5 * critics  # values, gradient and two moments; the critics' targets
        row = 4 * self.critic_width * (10.5 + 11.65 * self.blocks) + 12 * self.atoms
        return round(4 * (state + row * self.batch_size))

    def problems(self, num_envs: int) -> list[UserError]:
        """Settings that cannot work, those of the base included."""
        found = super().problems(num_envs)

        def require(holds: bool, name: str, allowed: str) -> None:
            if not holds:
                found.append(UserError(f"learner.{name}", self.__dict__[name], f"allowed: {allowed}"))

        for name in ("actor_width", "critic_width", "blocks", "actor_every", "noise_longest"):
            require(self.__dict__[name] >= 1, name, "1 or more")
        for name in ("learning_rate", "temperature", "target_std", "max_return"):
            require(0 < self.__dict__[name] < math.inf, name, "more than 0")
        require(0 <= self.final_learning_rate < math.inf, "final_learning_rate", "0 or more")
        require(0 <= self.noise_exponent < math.inf, "noise_exponent", "0 or more")
        require(self.atoms >= 2, "atoms", "2 or more")
        require(self.batch_size >= 2, "batch_size", "2 or more, as batches are normalised")
        require(0 < self.tau <= 1, "tau", "more than 0, at most 1")
        require(0 <= self.warm_up_fraction <= 1, "warm_up_fraction", "0 to 1")
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
        from unilab_fabric.learners.flash_sac.learner import FlashSACLearner

        return FlashSACLearner(self, spec, device, precision, ranks, seed, total_updates)
