"""Parameters and gradients of a module as views into one contiguous tensor each.

Zeroing the gradients is then one fill, their mean over ranks one collective without packing, their norm one
reduction, and the optimiser sees one tensor.
"""

from collections.abc import Iterable
from dataclasses import dataclass

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

    values: nn.Parameter
    """(size,): all parameters, the one leaf of the optimiser; its `grad` is `gradient`."""
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
        self.values = nn.Parameter(torch.zeros(size, dtype=first.dtype, device=first.device))
        self.reduced = torch.zeros(size + tail, dtype=first.dtype, device=first.device)
        self.gradient = self.reduced[:size]
        self.tail = self.reduced[size:]
        self.values.grad = self.gradient
        for view in self.views:
            parameter = parameters[view.name]
            view.of(self.values.data).copy_(parameter.data)
            parameter.data = view.of(self.values.data)
            parameter.grad = view.of(self.gradient)

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
                if actual is None or actual.data_ptr() != view.of(flat.data).data_ptr():
                    raise RuntimeError(f"the{what} tensor of parameter {view.name} is no longer a view of the flat one")


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT


def _lay_out(parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterable[View]:
    offset = 0
    for name, parameter in parameters:
        yield View(name, parameter.shape, offset)
        offset += _aligned(parameter.numel())


class FlatAdamW(torch.optim.AdamW):
    """Fused AdamW (Loshchilov and Hutter 2019) whose state exists from the start and which a device flag can hold back.

    With `found_inf` 1 a step leaves weights, moments and step count alone: no question to the host. Fused because the
    unfused kinds have no such flag, and because one implementation must serve every topology.
    """

    grad_scale: Tensor | None
    found_inf: Tensor

    def __init__(self, leaves: list[tuple[nn.Parameter, Tensor, float]], betas: tuple[float, float]) -> None:
        """`leaves` are (flat parameter, learning rate as a device tensor, weight decay)."""
        groups = [{"params": [leaf], "lr": lr, "weight_decay": decay} for leaf, lr, decay in leaves]
        device = leaves[0][0].device
        super().__init__(groups, betas=betas, fused=True, capturable=device.type == "cuda")
        self.grad_scale = None
        self.found_inf = torch.zeros((), device=device)
        for leaf, _, _ in leaves:
            self.state[leaf] = {
                "step": torch.zeros((), device=device),
                "exp_avg": torch.zeros_like(leaf.data),
                "exp_avg_sq": torch.zeros_like(leaf.data),
            }

    def replicated(self, name: str, leaf: nn.Parameter) -> dict[str, Tensor]:
        """The live state of one leaf by group name: `<name>/exp_avg`, `<name>/exp_avg_sq`, `<name>/step`."""
        return {f"{name}/{key}": value for key, value in self.state[leaf].items()}
