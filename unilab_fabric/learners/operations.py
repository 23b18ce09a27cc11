"""What the learners compute with: the same four operations in PyTorch on any device, or fused on a CPU."""

from collections.abc import Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from unilab_fabric.learners import categorical, gaussian
from unilab_fabric.learners.mlp import Mlp


class Operations(Protocol):
    """Differentiable; B rows, n actions, K atoms evenly spaced on [low, high]. Logits are those of one member."""

    def perceptrons(self, mlp: Mlp, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """All members on the concatenated inputs, (B, ...) each: (B, outputs) for each member."""
        ...

    def squash(self, head: Tensor, noise: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `gaussian.squash`."""
        ...

    def expected_value(self, logits: Tensor, low: float, high: float) -> Tensor:
        """As `categorical.expected_value`."""
        ...

    def categorical_loss(
        self, logits: Tensor, next_logits: Tensor, soft_reward: Tensor, bootstrap: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy against the projected softmax(next_logits), and the mean expected return; scalars.

        logits and next_logits (B, K), soft_reward and bootstrap (B,); only logits have a gradient, of the first result.
        """
        ...


class TorchOperations:
    """The operations in plain PyTorch, with matrix products in bf16 through autocast if `bf16`."""

    def __init__(self, device: torch.device, *, bf16: bool) -> None:
        self._device = device
        self._bf16 = bf16

    def perceptrons(self, mlp: Mlp, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """As batched products on an accelerator; member by member on a CPU, where those are slower."""
        x = torch.cat(list(inputs), dim=-1)
        # the cache of cast weights would hand a captured graph the weights of the capture
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._bf16, cache_enabled=False):
            outputs = member_by_member(mlp, x) if self._device.type == "cpu" else batched(mlp, x)
        return [output.float() for output in outputs]

    def squash(self, head: Tensor, noise: Tensor, low: float, high: float) -> tuple[Tensor, Tensor, Tensor]:
        """As `gaussian.squash`."""
        return gaussian.squash(head, noise, low, high)

    def expected_value(self, logits: Tensor, low: float, high: float) -> Tensor:
        """As `categorical.expected_value`."""
        return categorical.expected_value(logits, low, high)

    def categorical_loss(
        self, logits: Tensor, next_logits: Tensor, soft_reward: Tensor, bootstrap: Tensor, low: float, high: float
    ) -> tuple[Tensor, Tensor]:
        """See Operations."""
        with torch.no_grad():
            probabilities = next_logits.softmax(-1)
            target = categorical.project(probabilities, soft_reward, bootstrap, low, high)
            value = categorical.expected_value(logits, low, high).mean()
        return categorical.cross_entropy(logits, target), value


def member_by_member(mlp: Mlp, x: Tensor) -> list[Tensor]:
    """(B, inputs) -> (B, outputs) for each member."""
    layers = [[parameter.unbind(0) for parameter in layer] for layer in mlp.by_layer()]
    return [_member(x, [[parameter[i] for parameter in layer] for layer in layers]) for i in range(mlp.members)]


def _member(x: Tensor, layers: Sequence[Sequence[Tensor]]) -> Tensor:
    *hidden, (head_weight, head_bias) = layers
    for weight, bias, scale, shift in hidden:
        x = functional.linear(x, weight, bias)
        x = functional.silu(functional.layer_norm(x, x.shape[-1:], scale, shift))
    return functional.linear(x, head_weight, head_bias)


def batched(mlp: Mlp, x: Tensor) -> Sequence[Tensor]:
    """The same with one product and one norm per layer for all members."""
    *hidden, (head_weight, head_bias) = mlp.by_layer()
    x = x.expand(mlp.members, *x.shape)
    for weight, bias, scale, shift in hidden:
        x = torch.baddbmm(bias.unsqueeze(1), x, weight.mT)
        x = functional.layer_norm(x, x.shape[-1:])
        x = functional.silu(torch.addcmul(shift.unsqueeze(1), scale.unsqueeze(1), x))
    return torch.baddbmm(head_bias.unsqueeze(1), x, head_weight.mT).unbind(0)


def choose_operations(device: torch.device, precision: str, kernels: Literal["auto", "off"]) -> Operations:
    """Fused ones on a CPU where the kernels can be built and are wanted, else plain PyTorch."""
    from unilab_fabric.learners.fused import FusedOperations
    from unilab_fabric.learners.kernels import load_kernels

    bf16 = precision == "bf16-mixed"
    if device.type == "cpu" and kernels == "auto":
        loaded = load_kernels(torch.bfloat16 if bf16 else torch.float32)
        if loaded is not None:
            return FusedOperations(loaded)
    return TorchOperations(device, bf16=bf16)
