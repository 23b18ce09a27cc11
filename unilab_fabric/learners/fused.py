"""The learners' operations on a CPU with the kernels of kernels.c: one autograd node each.

A network runs member by member and layer by layer: one matrix product, then one pass over its result for bias,
LayerNorm and SiLU together. A backward pass adds the gradients of parameters to the flat gradient itself, where
autograd would have put them, and hands autograd those of the inputs. In bf16 the flat tensor is cast anew in each pass,
so there is no copy to keep up to date; gradients of weights are rounded to bf16 as with autocast, all other gradients
and all parameters are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from unilab_fabric.learners.kernels import Kernels
from unilab_fabric.learners.mlp import Mlp
from unilab_fabric.learners.products import input_gradient, linear, weight_gradient


class FusedOperations:
    """See operations.Operations. A network must have been flattened before its first pass."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._networks: dict[Mlp, _Network] = {}

    def perceptrons(self, mlp: Mlp, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """(B, ...) each -> (B, outputs) for each member, in the dtype of the kernels."""
        if mlp not in self._networks:
            self._networks[mlp] = _Network(self._kernels, mlp)
        network = self._networks[mlp]
        if torch.is_grad_enabled():
            outputs: Sequence[Tensor] = _Perceptrons.apply(network, network.flat.leaf, *inputs)  # type: ignore[no-untyped-call]
            return outputs
        return [steps[-1].result for steps in network.forward(inputs)]

    def squash(self, head: Tensor, noise: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `gaussian.squash`."""
        squashed, log_prob, std = _Squash.apply(self._kernels, head, noise, low, high)  # type: ignore[no-untyped-call]
        return squashed, log_prob, std

    def expected_value(self, logits: Tensor, low: float, high: float) -> Tensor:
        """As `categorical.expected_value`."""
        value: Tensor = _ExpectedValue.apply(self._kernels, logits, low, high)  # type: ignore[no-untyped-call]
        return value

    def categorical_loss(
        self, logits: Tensor, next_logits: Tensor, soft_reward: Tensor, bootstrap: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        """See operations.Operations."""
        loss, value = _CategoricalLoss.apply(  # type: ignore[no-untyped-call]
            self._kernels, logits, next_logits, soft_reward, bootstrap, low, high
        )
        return loss, value


@dataclass(frozen=True)
class _Layer:
    """Views of one member's layer: the weight for products, float32 vectors, and where their gradients go."""

    weight: Tensor
    vectors: list[Tensor]
    """Bias, scale and shift; of the head the bias alone."""
    of_weight: Tensor
    of_vectors: list[Tensor]


@dataclass(frozen=True)
class _Step:
    """What one layer of a forward pass leaves for the backward pass."""

    inputs: Tensor
    result: Tensor
    """The matrix product; of the head with its bias."""
    statistics: Tensor | None
    """Mean and 1 / std of each row of result + bias, (2, B); of the head none."""


class _Network:
    """One Mlp with views of everything a pass touches, made once."""

    def __init__(self, kernels: Kernels, mlp: Mlp) -> None:
        self.kernels = kernels
        self.flat = mlp.flat
        self._cast = self.flat.values.to(kernels.dtype)  # in float32 the flat tensor itself
        self.members = [self._layers(mlp, member) for member in range(mlp.members)]

    def _layers(self, mlp: Mlp, member: int) -> list[_Layer]:
        views = {view.name: view for view in self.flat.views}
        values = self.flat.values
        return [
            _Layer(
                weight=views[weight].of(self._cast)[member],
                vectors=[views[name].of(values)[member] for name in vectors],
                of_weight=views[weight].of(self.flat.gradient)[member],
                of_vectors=[views[name].of(self.flat.gradient)[member] for name in vectors],
            )
            for weight, *vectors in mlp.names_by_layer()
        ]

    def forward(self, inputs: Sequence[Tensor]) -> list[list[_Step]]:
        """The steps of each member: its hidden layers, then its head."""
        if self.kernels.dtype != torch.float32:
            self._cast.copy_(self.flat.values)
        joined = torch.cat([part.to(self.kernels.dtype) for part in inputs], dim=-1)
        return [self._forward(layers, joined) for layers in self.members]

    def _forward(self, layers: Sequence[_Layer], x: Tensor) -> list[_Step]:
        steps = []
        for layer in layers[:-1]:
            product = linear(x, layer.weight)
            out, statistics = self.kernels.norm_silu(product, *layer.vectors)
            steps.append(_Step(x, product, statistics))
            x = out
        head = layers[-1]
        steps.append(_Step(x, linear(x, head.weight, head.vectors[0].to(x.dtype)), None))
        return steps

    def backward(self, member: int, steps: Sequence[_Step], grad: Tensor, *, parameters: bool) -> Tensor:
        """The gradient of the first product, from that of the head's result; adds those of the parameters if asked."""
        for index in range(len(steps) - 1, -1, -1):
            layer, step = self.members[member][index], steps[index]
            if step.statistics is not None:
                of_vectors = layer.of_vectors if parameters else (None, None, None)
                self.kernels.norm_silu_backward(grad, step.result, layer.vectors, step.statistics, of_vectors)
            elif parameters:
                self.kernels.column_sums(grad, layer.of_vectors[0])
            if parameters:
                layer.of_weight.add_(weight_gradient(grad, step.inputs))
            if index > 0:
                grad = input_gradient(grad, layer.weight)
        return grad


class _Perceptrons(Function):
    @staticmethod
    def forward(ctx: Any, network: _Network, _: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        steps = network.forward(inputs)
        ctx.network = network
        ctx.sizes = [part.shape[-1] for part in inputs]
        # the head's result is an output, which must not hold its own graph; backward does not read it
        ctx.steps = [[*hidden, _Step(head.inputs, head.inputs, None)] for *hidden, head in steps]
        return tuple(member[-1].result for member in steps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        network: _Network = ctx.network
        _, needs_parameters, *needs_inputs = ctx.needs_input_grad
        of_inputs: list[Tensor | None] = [None] * len(needs_inputs)
        for member, grad in enumerate(grads):
            first = network.backward(member, ctx.steps[member], grad.contiguous(), parameters=needs_parameters)
            _add_input_gradients(of_inputs, needs_inputs, ctx.sizes, first, network.members[member][0].weight)
        return (None, None, *of_inputs)


def _add_input_gradients(
    of_inputs: list[Tensor | None], needs: Sequence[bool], sizes: Sequence[int], grad: Tensor, weight: Tensor
) -> None:
    """Adds one member's share for each of the joined inputs that needs it, and computes no other columns."""
    start = 0
    for place, (need, size) in enumerate(zip(needs, sizes, strict=True)):
        if need:
            share = input_gradient(grad, weight[:, start : start + size].contiguous()).float()
            before = of_inputs[place]
            of_inputs[place] = share if before is None else before + share
        start += size


class _Squash(Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: Kernels, head: Tensor, noise: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        squashed, std, raw_tanh, log_prob = kernels.squash(head, noise, low, high)
        ctx.kernels, ctx.low, ctx.high = kernels, low, high
        ctx.save_for_backward(noise, squashed, std, raw_tanh)
        ctx.mark_non_differentiable(std)
        return squashed, log_prob, std

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_squashed: Tensor, grad_log_prob: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad = ctx.kernels.squash_backward(
            grad_squashed.contiguous(), grad_log_prob.contiguous(), *ctx.saved_tensors, ctx.low, ctx.high
        )
        return None, grad, None, None, None


class _ExpectedValue(Function):
    @staticmethod
    def forward(ctx: Any, kernels: Kernels, logits: Tensor, low: float, high: float) -> Tensor:
        value = kernels.expected_value(logits, low, high)
        ctx.kernels, ctx.low, ctx.high = kernels, low, high
        ctx.save_for_backward(logits, value)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_value: Tensor) -> tuple[Tensor | None, ...]:
        grad = ctx.kernels.expected_value_backward(grad_value.contiguous(), *ctx.saved_tensors, ctx.low, ctx.high)
        return None, grad, None, None


class _CategoricalLoss(Function):
    @staticmethod
    def forward(
        ctx: Any,
        kernels: Kernels,
        logits: Tensor,
        next_logits: Tensor,
        soft_reward: Tensor,
        bootstrap: Tensor,
        low: float,
        high: float,
    ) -> tuple[Tensor, Tensor]:
        loss, value, grad = kernels.categorical_loss(logits, next_logits, soft_reward, bootstrap, low, high)
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(value)
        return loss, value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return None, grad * grad_loss, None, None, None, None, None
