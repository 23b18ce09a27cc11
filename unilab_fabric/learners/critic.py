"""Categorical critics: several networks that predict a distribution of the return on fixed atoms."""

from collections.abc import Sequence

from torch import Tensor, nn

from unilab_fabric.learners.mlp import Mlp
from unilab_fabric.learners.operations import Operations


class CategoricalCritics(nn.Module):
    """M independent networks over (critic observation, action), with K logits each."""

    def __init__(
        self,
        members: int,
        observation_size: int,
        action_size: int,
        hidden: Sequence[int],
        atoms: int,
        normaliser: nn.Module,
    ) -> None:
        """`normaliser` is handed in, since the target critics share it."""
        super().__init__()
        self.normaliser = normaliser
        self.net = Mlp(members, observation_size + action_size, hidden, atoms)

    def logits(self, operations: Operations, observation: Tensor, action: Tensor) -> Sequence[Tensor]:
        """(B, observation) and (B, actions) -> (B, K) for each of the M critics."""
        return operations.perceptrons(self.net, [self.normaliser(observation), action])
