"""A few multilayer perceptrons of the same shape whose parameters lie together."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from unilab_fabric.parallel.flat import FlatParameters


class Linear(nn.Module):
    """Parameters of `members` linear layers, each laid out and started like torch's Linear."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        bound = 1.0 / math.sqrt(inputs)
        self.weight = nn.Parameter(torch.empty(members, outputs, inputs).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(members, outputs).uniform_(-bound, bound))


class LayerNorm(nn.Module):
    """Parameters of `members` layer normalisations."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(members, width))
        self.bias = nn.Parameter(torch.zeros(members, width))


class Mlp(nn.Module):
    """`members` networks of [Linear, LayerNorm, SiLU] per hidden width and a last Linear; `operations.py` runs them."""

    flat: FlatParameters

    def __init__(self, members: int, inputs: int, hidden: Sequence[int], outputs: int) -> None:
        super().__init__()
        self.members = members
        widths = [inputs, *hidden]
        self.linears = nn.ModuleList(Linear(members, a, b) for a, b in zip(widths, hidden, strict=False))
        self.norms = nn.ModuleList(LayerNorm(members, width) for width in hidden)
        self.head = Linear(members, widths[-1], outputs)

    def flatten(self, *, tail: int = 0) -> FlatParameters:
        """Moves the parameters into `flat`; call it on the final device, after any copy of the network was made."""
        self.flat = FlatParameters(self, tail=tail)
        return self.flat

    def names_by_layer(self) -> list[tuple[str, ...]]:
        """Names of weight, bias, norm weight and norm bias of each hidden layer, then weight and bias of the head."""
        hidden = [
            (f"linears.{i}.weight", f"linears.{i}.bias", f"norms.{i}.weight", f"norms.{i}.bias")
            for i in range(len(self.norms))
        ]
        return [*hidden, ("head.weight", "head.bias")]

    def by_layer(self) -> list[tuple[Tensor, ...]]:
        """The parameters in that order, each with the members first."""
        return [tuple(self.get_parameter(name) for name in names) for names in self.names_by_layer()]
