"""RSL-RL's perceptrons on a CPU: the same parameters under the same names, with faster passes.

Linear layers take the fastest product there is (see products.py), and an ELU behind one costs one pass each way, by the
CPU kernels. Values agree with PyTorch's to rounding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional

from unilab_fabric.learners.kernels import Kernels, load_kernels
from unilab_fabric.learners.products import input_gradient, linear, linear_with_bias, weight_gradient


class ProductLinear(nn.Linear):
    """nn.Linear; with kernels the ELU behind it too."""

    kernels: Kernels | None = None

    def forward(self, input: Tensor) -> Tensor:
        """(B, inputs) -> (B, outputs)."""
        if torch.is_autocast_enabled(input.device.type):
            product = super().forward(input)
            return product if self.kernels is None else functional.elu(product)
        if self.kernels is None:
            return linear_with_bias(input, self.weight, self.bias)
        result: Tensor = _LinearElu.apply(self.kernels, input, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return result


def use_fast_passes(perceptron: nn.Sequential) -> None:
    """Replaces its linear layers, and the ELUs behind them where there are kernels."""
    kernels = load_kernels(torch.float32)
    names = list(perceptron._modules)  # named_children() tells a module that stands in several places once
    for name, following in zip(names, [*names[1:], ""], strict=True):
        module = perceptron.get_submodule(name)
        if not isinstance(module, nn.Linear):
            continue
        fast = ProductLinear(module.in_features, module.out_features)
        fast.weight, fast.bias = module.weight, module.bias
        if kernels is not None and following and isinstance(perceptron.get_submodule(following), nn.ELU):
            fast.kernels = kernels
            setattr(perceptron, following, nn.Identity())
        setattr(perceptron, name, fast)


class _LinearElu(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out = linear(x, weight, bias)
        kernels.elu(out)
        ctx.kernels = kernels
        ctx.save_for_backward(x, weight, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, out = ctx.saved_tensors
        of_bias = torch.zeros(len(weight))
        grad = ctx.kernels.elu_backward(grad.contiguous(), out, of_bias)
        of_x = input_gradient(grad, weight) if ctx.needs_input_grad[1] else None
        return None, of_x, weight_gradient(grad, x), of_bias
