"""BatchNorm and ReLU in one pass each way, by the CPU kernels."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unilab_fabric.learners.kernels import Kernels


def norm_relu(
    kernels: Kernels,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    running: Tensor,
    batch: Tensor | None,
    residual: Tensor | None,
    eps: float,
) -> Tensor:
    """relu(batch_norm(x)), in the kernels' dtype as x (B, W) is; with `residual` (B, W) float32, their float32 sum.

    Statistics are `running` (2, W), or those of x, then left in `batch` (3, W): see `UnitBatchNorm`.
    """
    result: Tensor = _NormRelu.apply(kernels, x, weight, bias, running, batch, residual, eps)  # type: ignore[no-untyped-call]
    return result


class _NormRelu(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running: Tensor,
        batch: Tensor | None,
        residual: Tensor | None,
        eps: float,
    ) -> Tensor:
        mean, variance = running if batch is None else kernels.column_moments(x)
        if batch is not None:
            torch.stack([mean, variance, mean.square()], out=batch)
        rstd = (variance + eps).rsqrt()
        scale = weight * rstd
        shift = torch.addcmul(bias, mean, scale, value=-1.0)
        ctx.kernels, ctx.batch, ctx.wide = kernels, batch is not None, residual is not None
        ctx.save_for_backward(x, mean.contiguous(), rstd, scale, shift)
        return kernels.norm_relu(x, scale, shift, residual)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *vectors = ctx.saved_tensors
        of_weight = of_bias = None
        if ctx.needs_input_grad[2]:
            of_weight, of_bias = torch.zeros(2, x.shape[1])
        grad = grad.contiguous()
        of_x = ctx.kernels.norm_relu_backward(grad, x, vectors, of_weight, of_bias, wide=ctx.wide, batch=ctx.batch)
        return None, of_x, of_weight, of_bias, None, None, grad if ctx.wide else None, None
