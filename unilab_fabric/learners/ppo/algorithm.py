"""RSL-RL's PPO where it must know of ours: how its gradients are reduced, and steps that are left out.

Everything else is RSL-RL's own: losses, mini-batches, the learning rate that all ranks agree on, the mean gradient and
the statistics of observations over ranks.
"""

from typing import Any

import torch
from rsl_rl.algorithms import PPO as RslRlPPO
from torch import Tensor, nn
from typing_extensions import override

from unilab_fabric.learners.skips import SkippedSteps
from unilab_fabric.parallel.reduce import Ranks

OPTIMISER = "policy"


class HeldAdam(torch.optim.Adam):
    """Fused Adam that leaves out a step whose gradient is not finite, and counts it; asks nothing of the host."""

    def __init__(self, parameters: list[nn.Parameter], lr: float, skipped: SkippedSteps) -> None:
        super().__init__(parameters, lr=lr, fused=True)
        self._skipped = skipped
        self.marks = torch.zeros(skipped.floats, device=parameters[0].device)
        """Ranks whose own gradient was not finite, since the last step."""
        self.grad_scale = None  # as torch's gradient scaler leaves it; together with `found_inf` it holds a step back
        self.found_inf = torch.zeros((), device=parameters[0].device)
        for parameter in parameters:  # from the start, to be broadcast and loaded into
            self.state[parameter] = {
                "step": torch.zeros((), device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    @override
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step; the gradient is the same on every rank, and so is the verdict."""
        kept = _all_finite(self._gradients())
        self.found_inf.copy_((~kept).float())
        super().step()
        self._skipped.count(OPTIMISER, kept, self.marks)

    def mark(self, rank: int) -> None:
        """Before the gradients are reduced: notes whether this rank's are finite."""
        self.marks.zero_()
        self.marks[rank] = ~_all_finite(self._gradients())

    def _gradients(self) -> list[Tensor]:
        return [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]


class PPOAlgorithm(RslRlPPO):  # type: ignore[misc]
    """RSL-RL's PPO over our ranks."""

    optimizer: HeldAdam

    def __init__(self, *, ranks: Ranks, skipped: SkippedSteps, learning_rate: float, **settings: Any) -> None:
        """`settings` are RSL-RL's."""
        shared = {"global_rank": ranks.rank, "local_rank": 0, "world_size": ranks.world_size}
        super().__init__(
            **settings, learning_rate=learning_rate, multi_gpu_cfg=shared if ranks.world_size > 1 else None
        )
        self._ranks = ranks
        parameters = [*self.actor.parameters(), *self.critic.parameters()]
        self.optimizer = HeldAdam(parameters, learning_rate, skipped)

    @override
    def reduce_parameters(self) -> None:
        """The mean gradient over ranks, RSL-RL's; besides, which ranks brought one that is not finite."""
        self.optimizer.mark(self._ranks.rank)
        self._ranks.sum_(self.optimizer.marks, "marks of the gradient")
        with self._ranks.waits.counted():
            super().reduce_parameters()


def _all_finite(tensors: list[Tensor]) -> Tensor:
    return torch.stack(torch._foreach_norm(tensors)).isfinite().all()
