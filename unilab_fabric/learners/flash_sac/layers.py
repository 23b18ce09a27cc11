"""FlashSAC's networks: every layer bounds the norm of what it passes on (arXiv:2604.04539).

M members of the same shape are evaluated one after the other on a CPU, with one product for all of them on an
accelerator. A network's BatchNorms keep their running statistics in
one tensor, and in a pass over a batch they write that batch's statistics into another one, for the ranks to average.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilab_fabric.learners.flash_sac.fused import norm_relu
from unilab_fabric.learners.kernels import Kernels
from unilab_fabric.learners.products import product
from unilab_fabric.parallel.flat import FlatParameters

EXPANSION = 4
RUNNING_WEIGHT = 0.01
"""Share of a new batch in the running statistics."""
BATCH_EPS = 1e-5
_RMS_EPS = 1e-6
_UNIT_EPS = 1e-8


@dataclass(frozen=True)
class Arithmetic:
    """How a pass computes: the dtype of matrix products, by what they are computed, and fused CPU kernels if any."""

    dtype: torch.dtype
    kernels: Kernels | None = None
    product: Callable[[Tensor, Tensor], Tensor] = product


PLAIN = Arithmetic(torch.float32, product=functional.linear)
"""Nothing but ordinary PyTorch, as a policy that leaves the trainer needs it."""


class UnitLinear(nn.Module):
    """Linear layers without bias, orthogonal at the start, each row of length 1."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, outputs, inputs))
        for weight in self.weight:
            nn.init.orthogonal_(weight)
        self.project()

    def forward(self, member: int, x: Tensor, arithmetic: Arithmetic) -> Tensor:
        """(B, inputs) -> (B, outputs) in the dtype of `arithmetic`."""
        return arithmetic.product(x.to(arithmetic.dtype), self.weight[member].to(arithmetic.dtype))

    def batched(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """All members at once, (M, B, inputs) -> (M, B, outputs), computed in `dtype` and returned in float32."""
        return torch.bmm(x.to(dtype), self.weight.to(dtype).mT).float()

    @torch.no_grad()
    def project(self) -> None:
        """Divides each row by its length."""
        self.weight.div_(torch.linalg.vector_norm(self.weight, dim=-1, keepdim=True) + _UNIT_EPS)


class UnitBatchNorm(nn.Module):
    """BatchNorm whose scale and shift together keep the length sqrt(width)."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(members, width))
        self.bias = nn.Parameter(torch.zeros(members, width))

    def forward(self, member: int, x: Tensor, running: Tensor, batch: Tensor | None) -> Tensor:
        """(B, width) -> (B, width), with the statistics `running` (2, width), or those of x, then left in `batch`.

        `running` holds mean and variance; `batch` (3, width) takes mean, biased variance and squared mean.
        """
        weight, bias = self.weight[member], self.bias[member]
        if batch is None:
            return functional.batch_norm(x, running[0], running[1], weight, bias, False, 0.0, BATCH_EPS)
        y, mean, inverse_std = torch.native_batch_norm(x, weight, bias, None, None, True, 0.0, BATCH_EPS)
        with torch.no_grad():
            batch[0].copy_(mean)
            batch[1].copy_(inverse_std.square().reciprocal() - BATCH_EPS)
            batch[2].copy_(mean.square())
        return y

    def relu(
        self,
        member: int,
        x: Tensor,
        running: Tensor,
        batch: Tensor | None,
        kernels: Kernels | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """relu of `forward`, (B, width) in any dtype, plus `residual` if there is one; with kernels in one pass."""
        if kernels is not None:
            weight, bias = self.weight[member], self.bias[member]
            return norm_relu(kernels, x, weight, bias, running, batch, residual, BATCH_EPS)
        y = self.forward(member, x.float(), running, batch).relu()
        return y if residual is None else residual + y

    def batched(self, x: Tensor, running: Tensor, batch: Tensor | None) -> Tensor:
        """All members at once, (M, B, width) -> (M, B, width); running (2, M, width), batch (3, M, width)."""
        mean, variance = running
        if batch is not None:
            variance, mean = torch.var_mean(x, dim=1, unbiased=False)
            with torch.no_grad():
                batch.copy_(torch.stack([mean, variance, mean.square()]))
        scale = self.weight * (variance + BATCH_EPS).rsqrt()
        return torch.addcmul((self.bias - mean * scale).unsqueeze(1), x, scale.unsqueeze(1))

    @torch.no_grad()
    def project(self) -> None:
        """Scales both to the joint length sqrt(width)."""
        length = (self.weight.square() + self.bias.square()).sum(-1, keepdim=True)
        factor = (self.width / (length + _UNIT_EPS)).sqrt()
        self.weight.mul_(factor)
        self.bias.mul_(factor)


class UnitRMSNorm(nn.Module):
    """RMSNorm whose scale keeps the length sqrt(width)."""

    def __init__(self, members: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(members, width))

    def forward(self, member: int, x: Tensor) -> Tensor:
        """(B, width) -> (B, width)."""
        return self._unit(x) * self.weight[member]

    def batched(self, x: Tensor) -> Tensor:
        """All members at once, (M, B, width) -> (M, B, width)."""
        return self._unit(x) * self.weight.unsqueeze(1)

    def _unit(self, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + _RMS_EPS).rsqrt()

    @torch.no_grad()
    def project(self) -> None:
        """Scales it to the length sqrt(width)."""
        self.weight.mul_((self.width / (self.weight.square().sum(-1, keepdim=True) + _UNIT_EPS)).sqrt())


class FlashNet(nn.Module):
    """M networks: BatchNorm and a linear layer, inverted residual blocks, RMSNorm, a linear head with a bias."""

    flat: FlatParameters

    def __init__(self, members: int, inputs: int, width: int, blocks: int, outputs: int) -> None:
        super().__init__()
        self.members = members
        inner = EXPANSION * width
        self.input_norm = UnitBatchNorm(members, inputs)
        self.embedder = UnitLinear(members, inputs, width)
        self.wide = nn.ModuleList(UnitLinear(members, width, inner) for _ in range(blocks))
        self.wide_norms = nn.ModuleList(UnitBatchNorm(members, inner) for _ in range(blocks))
        self.narrow = nn.ModuleList(UnitLinear(members, inner, width) for _ in range(blocks))
        self.narrow_norms = nn.ModuleList(UnitBatchNorm(members, width) for _ in range(blocks))
        self.output_norm = UnitRMSNorm(members, width)
        self.head = UnitLinear(members, width, outputs)
        self.head_bias = nn.Parameter(torch.zeros(members, outputs))
        self._widths = [inputs, *[inner, width] * blocks]
        running = torch.zeros(2, members * sum(self._widths))
        running[1] = 1.0
        self.register_buffer("running", running)

    running: Tensor
    """(2, channels): mean and variance of all BatchNorms of all members."""

    @property
    def channels(self) -> int:
        """Channels of all BatchNorms of all members."""
        return self.running.shape[1]

    def flatten(self, *, tail: int = 0) -> FlatParameters:
        """Moves the parameters into `flat`; call it on the final device, after any copy of the network was made."""
        self.flat = FlatParameters(self, tail=tail)
        return self.flat

    def forward(self, x: Tensor, arithmetic: Arithmetic = PLAIN, *, batch: Tensor | None = None) -> list[Tensor]:
        """(B, inputs) -> (B, outputs) for each member, float32.

        With `batch` (3, channels) the BatchNorms use the statistics of x and leave them there; without it the running
        ones.
        """
        if x.is_cpu:
            return [self._member(member, x, arithmetic, batch) for member in range(self.members)]
        return self.batched(x, arithmetic, batch=batch)

    def batched(self, x: Tensor, arithmetic: Arithmetic, *, batch: Tensor | None) -> list[Tensor]:
        """As `forward`, with few large operations: the faster way on an accelerator."""
        running = torch.split(self.running.view(2, self.members, -1), self._widths, dim=2)
        noted: tuple[Tensor | None, ...] = (None,) * len(running)
        if batch is not None:
            noted = torch.split(batch.view(3, self.members, -1), self._widths, dim=2)
        x, dtype = x.expand(self.members, *x.shape), arithmetic.dtype
        x = self.embedder.batched(self.input_norm.batched(x, running[0], noted[0]), dtype)
        for i, (wide, wide_norm, narrow, narrow_norm) in enumerate(self._blocks()):
            first, second = 1 + 2 * i, 2 + 2 * i
            y = wide_norm.batched(wide.batched(x, dtype), running[first], noted[first]).relu()
            x = x + narrow_norm.batched(narrow.batched(y, dtype), running[second], noted[second]).relu()
        head = self.head.batched(self.output_norm.batched(x), dtype) + self.head_bias.unsqueeze(1)
        return list(head.unbind(0))

    def _member(self, member: int, x: Tensor, arithmetic: Arithmetic, batch: Tensor | None) -> Tensor:
        start = member * sum(self._widths)
        parts = torch.split(self.running[:, start : start + sum(self._widths)], self._widths, dim=1)
        noted: tuple[Tensor | None, ...] = (None,) * len(parts)
        if batch is not None:
            noted = torch.split(batch[:, start : start + sum(self._widths)], self._widths, dim=1)
        x = self.embedder(member, self.input_norm(member, x, parts[0], noted[0]), arithmetic).float()
        for i, (wide, wide_norm, narrow, narrow_norm) in enumerate(self._blocks()):
            first, second = 1 + 2 * i, 2 + 2 * i
            y = wide_norm.relu(member, wide(member, x, arithmetic), parts[first], noted[first], arithmetic.kernels)
            z = narrow(member, y, arithmetic)
            x = narrow_norm.relu(member, z, parts[second], noted[second], arithmetic.kernels, residual=x)
        head: Tensor = self.head(member, self.output_norm(member, x), arithmetic)
        return head.float() + self.head_bias[member]

    def _blocks(self) -> list[tuple[UnitLinear, UnitBatchNorm, UnitLinear, UnitBatchNorm]]:
        return list(zip(self.wide, self.wide_norms, self.narrow, self.narrow_norms, strict=True))  # type: ignore[arg-type]

    def project(self) -> None:
        """Brings every layer back to its norm; after each optimiser step."""
        for module in self.modules():
            if isinstance(module, UnitLinear | UnitBatchNorm | UnitRMSNorm):
                module.project()

    @torch.no_grad()
    def follow(self, batch: Tensor, rows: int, keep: Tensor) -> None:
        """Moves the running statistics a little towards those of the ranks' batches, if the bool scalar `keep` is true.

        batch (3, channels) is the mean over ranks of what each has left there, `rows` those of all ranks. The variance
        of the joined batch is the mean of the variances plus the variance of the means.
        """
        mean = batch[0]
        variance = batch[1] + (batch[2] - mean.square())
        unbiased = torch.stack([mean, variance * (rows / (rows - 1))])
        self.running.copy_(torch.where(keep, self.running.lerp(unbiased, RUNNING_WEIGHT), self.running))
