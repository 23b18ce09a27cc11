"""A squashed Gaussian policy."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unilab_fabric.learners.mlp import Mlp
from unilab_fabric.learners.operations import Operations, member_by_member
from unilab_fabric.parallel.statistics import RunningNormaliser

LOG_STD_MIN = -5.0
LOG_STD_MAX = 0.0  # before tanh; a wider Gaussian only moves mass to the limits of the action


class Actor(nn.Module):
    """Actions from actor observations, in the environment's units; n is the number of actions.

    The head starts at zero: the first policy has mean 0 (before scaling) and the same width in every state.
    """

    scale: Tensor
    offset: Tensor

    def __init__(
        self,
        observation_size: int,
        hidden: Sequence[int],
        action_low: Sequence[float],
        action_high: Sequence[float],
        normalise: bool,
    ) -> None:
        super().__init__()
        self.normaliser = RunningNormaliser(observation_size) if normalise else nn.Identity()
        self.net = Mlp(1, observation_size, hidden, 2 * len(action_low))
        nn.init.zeros_(self.net.head.weight)
        nn.init.zeros_(self.net.head.bias)
        low, high = torch.tensor(action_low), torch.tensor(action_high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("offset", (high + low) / 2)

    def forward(self, observation: Tensor) -> Tensor:
        """The deterministic action in float32 and plain PyTorch, (B, observation) -> (B, n)."""
        (head,) = member_by_member(self.net, self.normaliser(observation))
        return head.chunk(2, dim=-1)[0].tanh() * self.scale + self.offset

    def sample(self, operations: Operations, observation: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Reparameterised actions for standard normal `noise` (B, n), their log-density (B,), and std (B, n).

        The scale belongs to the density: entropy is in units of the environment's action.
        """
        (head,) = operations.perceptrons(self.net, [self.normaliser(observation)])
        squashed, log_prob, std = operations.squash(head, noise, LOG_STD_MIN, LOG_STD_MAX)
        return squashed * self.scale + self.offset, log_prob - self.scale.log().sum(), std
