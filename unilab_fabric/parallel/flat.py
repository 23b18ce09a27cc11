"""Parameters and gradients of a module as views into one contiguous tensor each.

Zeroing the gradients is then one fill, their mean over ranks one collective without packing, their norm one
reduction, and the optimiser sees one tensor.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ALIGNMENT = 64  # elements; a whole cache line for every dtype, and what vectorised kernels ask for


@dataclass(frozen=True)
class View:
    """Where one parameter lies in the flat tensors."""

    name: str
    shape: torch.Size
    offset: int

    def of(self, flat: Tensor) -> Tensor:
        """The parameter's part of a flat tensor, in the parameter's shape."""
        return flat[self.offset : self.offset + self.shape.numel()].view(self.shape)


class FlatParameters:
    """The parameters of `module`, moved into one tensor; call it after the module is on its device.

    Each view starts at a multiple of 64 elements; the padding is zero and stays zero. The module's state dict keeps
    its ordinary names and shapes, and `load_state_dict` fills the flat tensor in place. What breaks the views is
    `zero_grad()` with its default, `backward(create_graph=True)`, a change of dtype or device and
    `load_state_dict(assign=True)`: `check_views` finds it.
    """

    values: Tensor
    """(size,): all parameters, what the optimiser steps."""
    leaf: nn.Parameter
    """The same storage as a leaf of autograd, for operations on all parameters at once; its `grad` is `gradient`."""
    reduced: Tensor
    """(size + tail,): what one all-reduce carries."""
    gradient: Tensor
    """(size,): the first part of `reduced`."""
    tail: Tensor
    """(tail,): the last part of `reduced`, for what rides on the same all-reduce."""

    def __init__(self, module: nn.Module, *, tail: int = 0) -> None:
        self.module = module
        parameters = dict(module.named_parameters())
        self.views = tuple(_lay_out(parameters.items()))
        size = sum(_aligned(parameter.numel()) for parameter in parameters.values())
        first = next(iter(parameters.values()))
        self.values = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.leaf = nn.Parameter(self.values)
        self.reduced = torch.zeros(size + tail, dtype=first.dtype, device=first.device)
        self.gradient = self.reduced[:size]
        self.tail = self.reduced[size:]
        self.leaf.grad = self.gradient
        for view in self.views:
            parameter = parameters[view.name]
            view.of(self.values).copy_(parameter.data)
            parameter.data = view.of(self.values)
            parameter.grad = view.of(self.gradient)
        self._leaves = [self.leaf, *parameters.values()]
        self.check_views()

    @property
    def layout(self) -> list[list[Any]]:
        """Name, shape and offset [elements] of each parameter, as plain values."""
        return [[view.name, list(view.shape), view.offset] for view in self.views]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Within it graphs are built that have no gradient for these parameters, and do not spend time on one."""
        for parameter in self._leaves:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in self._leaves:
                parameter.requires_grad_(True)

    def zero_gradient(self) -> None:
        """Zeroes the gradient and the tail."""
        self.reduced.zero_()

    def clip_norm_(self, max_norm: float) -> Tensor:
        """Scales the gradient down to `max_norm` (0 leaves it) and returns its norm before, a scalar tensor."""
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        if max_norm > 0:
            self.gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def check_views(self) -> None:
        """Raises RuntimeError with the name of the first parameter that left the flat tensors."""
        for view in self.views:
            parameter = self.module.get_parameter(view.name)
            for what, actual, flat in [("", parameter, self.values), (" gradient", parameter.grad, self.gradient)]:
                if actual is None or actual.data_ptr() != view.of(flat).data_ptr():
                    raise RuntimeError(f"the{what} tensor of parameter {view.name} is no longer a view of the flat one")


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _lay_out(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterable[View]:
    offset = 0
    for name, parameter in parameters:
        yield View(name, parameter.shape, offset)
        offset += _aligned(parameter.numel())


class FlatAdamW:
    """Fused AdamW (Loshchilov and Hutter 2019) of one flat tensor, which a flag on the device can hold back.

    Fused because torch's other kinds have no such flag, and because one implementation must serve every topology.
    """

    def __init__(
        self, values: Tensor, gradient: Tensor, *, betas: tuple[float, float], weight_decay: float = 0.0
    ) -> None:
        """`values` and `gradient` (size,); the moments exist from the start, to be broadcast and saved."""
        self._values = values
        self._gradient = gradient
        self._betas = betas
        self._weight_decay = weight_decay
        self._exp_avg = torch.zeros_like(values)
        self._exp_avg_sq = torch.zeros_like(values)
        self._step = torch.zeros((), device=values.device)

    @property
    def steps(self) -> Tensor:
        """Steps taken, a scalar float tensor."""
        return self._step

    def step(self, learning_rate: Tensor, skip: Tensor) -> None:
        """One step; if `skip` is 1, not 0, weights, moments and step count stay. Both are scalar float tensors."""
        # the operator behind torch.optim.AdamW(fused=True), without its Python; like there the caller counts steps
        self._step += 1
        torch._fused_adamw_(
            [self._values],
            [self._gradient],
            [self._exp_avg],
            [self._exp_avg_sq],
            [],
            [self._step],
            lr=learning_rate,
            beta1=self._betas[0],
            beta2=self._betas[1],
            weight_decay=self._weight_decay,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            found_inf=skip,
        )
        self._step -= skip

    def replicated(self, name: str) -> dict[str, Tensor]:
        """The live state by group name."""
        return {
            f"{name}/exp_avg": self._exp_avg,
            f"{name}/exp_avg_sq": self._exp_avg_sq,
            f"{name}/step": self._step,
        }
