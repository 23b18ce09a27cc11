"""Categorical critics: several networks that predict a distribution of the return on fixed atoms."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unilab_fabric.learners.mlp import Mlp


class CategoricalCritics(nn.Module):
    """M independent networks over (critic observation, action); K atoms evenly spaced on [v_min, v_max].

    Bellemare, Dabney and Munos 2017 (C51). The normaliser is handed in, since the target critics share it.
    """

    atoms: Tensor

    def __init__(
        self,
        members: int,
        observation_size: int,
        action_size: int,
        hidden: Sequence[int],
        atoms: Tensor,
        normaliser: nn.Module,
    ) -> None:
        super().__init__()
        self.normaliser = normaliser
        self.net = Mlp(members, observation_size + action_size, hidden, len(atoms))
        self.register_buffer("atoms", atoms)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        """Logits of the return's distribution, (B, observation) and (B, actions) -> (M, B, K) float32."""
        return self.net(torch.cat([self.normaliser(observation), action], dim=-1)).float()  # type: ignore[no-any-return]

    def value(self, logits: Tensor) -> Tensor:
        """Expected return, (M, B, K) -> (M, B)."""
        return logits.softmax(-1) @ self.atoms
