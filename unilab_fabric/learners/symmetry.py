"""Left-right mirror images of transitions, as data augmentation."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from unilab_fabric.learners.learner import Batch
from unilab_fabric.spaces import Mirror


class Reflection:
    """One mirror on the device: entry i of the image is sign[i] * x[..., index[i]]."""

    def __init__(self, mirror: Mirror, device: torch.device) -> None:
        self.index = torch.tensor(mirror.index, device=device)
        self.sign = torch.tensor(mirror.sign, device=device)

    def whole(self, rows: Tensor) -> Tensor:
        """The mirror image of (B, size)."""
        return rows.index_select(-1, self.index) * self.sign

    def half(self, rows: Tensor) -> Tensor:
        """(B, size) with the last B // 2 rows replaced by their mirror images."""
        kept = rows.shape[0] - rows.shape[0] // 2
        return torch.cat([rows[:kept], rows[kept:].index_select(1, self.index) * self.sign])


class MirrorHalf:
    """Mirrors half of each batch: as many transitions as without, and a policy that learns both sides from each."""

    def __init__(self, mirrors: Mapping[Literal["actor", "critic", "action"], Mirror], device: torch.device) -> None:
        self.actor = Reflection(mirrors["actor"], device)
        self.critic = Reflection(mirrors["critic"], device)
        self.action = Reflection(mirrors["action"], device)

    def __call__(self, batch: Batch) -> Batch:
        """The same transitions, the last half of them reflected; rewards and ends do not change."""
        return replace(
            batch,
            actor=self.actor.half(batch.actor),
            critic=self.critic.half(batch.critic),
            action=self.action.half(batch.action),
            next_actor=self.actor.half(batch.next_actor),
            next_critic=self.critic.half(batch.next_critic),
        )
