"""Exploration noise that is held for a random number of ticks, short times being the likeliest."""

import torch
from torch import Tensor


class HeldNoise:
    """Standard normal noise for N environments, all of them redrawn together after k ticks.

    P(k) is proportional to k to the power of minus `exponent` for k = 1 ... `longest`: a truncated zeta distribution
    (arXiv:2604.04539, noise repetition). Everything stays on the device.
    """

    def __init__(
        self, num_envs: int, actions: int, *, exponent: float, longest: int, generator: torch.Generator
    ) -> None:
        device = generator.device
        self._generator = generator
        weights = torch.arange(1, longest + 1, dtype=torch.float64, device=device).pow(-exponent)
        self._cumulative = (weights / weights.sum()).cumsum(0)
        self._noise = torch.zeros(num_envs, actions, device=device)
        self._left = torch.zeros((), dtype=torch.int64, device=device)  # ticks for which it is still held

    def next(self) -> Tensor:
        """(N, actions) for this tick; a view that the next call changes."""
        fresh = torch.randn(self._noise.shape, device=self._noise.device, generator=self._generator)
        draw = torch.rand(1, device=self._noise.device, generator=self._generator, dtype=torch.float64)
        length = 1 + torch.searchsorted(self._cumulative, draw, right=True).clamp(max=len(self._cumulative) - 1)
        over = self._left <= 0
        self._noise.copy_(torch.where(over, fresh, self._noise))
        self._left.copy_(torch.where(over, length.squeeze(0), self._left) - 1)
        return self._noise

    def local(self) -> dict[str, Tensor]:
        """The live state."""
        return {"noise/held": self._noise, "noise/left": self._left}
