"""The three matrix products of a linear layer on a CPU, each by the fastest library; weight (outputs, inputs).

bf16 products go to oneDNN from torch.mm itself. float32 ones go to MKL there, which on AMD processors leaves half of
AVX-512 unused: oneDNN, called through the operator that torch.compile uses, is 2.2 times as fast on a Zen 5.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (B, inputs) -> (B, outputs)."""
    if _onednn_float32(x):
        return _onednn(x, weight, bias)
    if bias is None:
        return torch.mm(x, weight.t())
    return torch.addmm(bias, x, weight.t())


def input_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """grad (B, outputs) -> (B, inputs)."""
    if _onednn_float32(grad):
        return _onednn(grad, weight.t(), None)
    return torch.mm(grad, weight)


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad (B, outputs) and x (B, inputs) -> (outputs, inputs)."""
    if _onednn_float32(grad):
        # the first factor is laid out anew before it is multiplied: let that be the smaller one
        if grad.shape[1] <= x.shape[1]:
            return _onednn(grad.t(), x.t(), None)
        return _onednn(x.t(), grad.t(), None).t()
    return torch.mm(grad.t(), x)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` without a bias, differentiable by both: x (B, inputs) -> (B, outputs)."""
    if not torch.is_grad_enabled():
        return linear(x, weight)
    result: Tensor = _Product.apply(x, weight)  # type: ignore[no-untyped-call]
    return result


def linear_with_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`linear`, differentiable by all three: x (B, inputs) -> (B, outputs)."""
    if not torch.is_grad_enabled():
        return linear(x, weight, bias)
    result: Tensor = _LinearWithBias.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _LinearWithBias(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        of_x = input_gradient(grad, weight) if ctx.needs_input_grad[0] else None
        return of_x, weight_gradient(grad, x), grad.sum(0)


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        return (
            input_gradient(grad, weight) if needs_x else None,
            weight_gradient(grad, x) if needs_weight else None,
        )


HAS_ONEDNN: bool = torch.backends.mkldnn.is_available() and torch.backends.cpu.get_cpu_capability() == "AVX512"  # type: ignore[no-untyped-call]


def _onednn_float32(x: Tensor) -> bool:
    return HAS_ONEDNN and x.is_cpu and x.dtype == torch.float32


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result
