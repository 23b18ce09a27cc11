"""A few multilayer perceptrons of the same shape, computed as one."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Linear(nn.Module):
    """`members` linear layers: (members, B, inputs) -> (members, B, outputs); starts like torch's Linear.

    The weight is stored (members, inputs, outputs), so that a batched product reads it as it lies.
    """

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(members, inputs, outputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, 1, outputs).uniform_(-bound, bound))

    def forward(self, x: Tensor) -> Tensor:
        """(members, B, inputs) -> (members, B, outputs)."""
        return torch.baddbmm(self.bias, x, self.weight)


class NormSiLU(nn.Module):
    """LayerNorm with a scale and a shift per member, then SiLU: (members, B, width) -> the same."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, 1, width))
        self.bias = nn.Parameter(torch.zeros(members, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        """(members, B, width) -> (members, B, width)."""
        normed = functional.layer_norm(x, x.shape[-1:])
        return functional.silu(torch.addcmul(self.bias, self.weight, normed))


class Mlp(nn.Module):
    """`members` networks of [Linear, LayerNorm, SiLU] per hidden width and a last Linear; (B, inputs) goes to each."""

    def __init__(self, members: int, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.members = members
        widths = [inputs, *hidden]
        self.linears = nn.ModuleList(Linear(members, a, b) for a, b in zip(widths, hidden, strict=False))
        self.norms = nn.ModuleList(NormSiLU(members, width) for width in hidden)
        self.head = Linear(members, widths[-1], outputs)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs) -> (members, B, outputs)."""
        x = x.expand(self.members, *x.shape)
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(linear(x))
        return self.head(x)  # type: ignore[no-any-return]
