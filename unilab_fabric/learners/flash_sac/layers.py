"""FlashSAC's networks: every layer bounds the norm of what it passes on (arXiv:2604.04539).

M members of the same shape are evaluated one after the other. A network's BatchNorms keep their running statistics in
one tensor, and in a pass over a batch they write that batch's statistics into another one, for the ranks to average.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from unilab_fabric.parallel.flat import FlatParameters

EXPANSION = 4
RUNNING_WEIGHT = 0.01
"""Share of a new batch in the running statistics."""
BATCH_EPS = 1e-5
_RMS_EPS = 1e-6
_UNIT_EPS = 1e-8


class UnitLinear(nn.Module):
    """Linear layers without bias, orthogonal at the start, each row of length 1."""

    def __init__(self, members: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, outputs, inputs))
        for weight in self.weight:
            nn.init.orthogonal_(weight)
        self.project()

    def forward(self, member: int, x: Tensor, bf16: bool) -> Tensor:
        """(B, inputs) -> (B, outputs), float32."""
        weight = self.weight[member]
        if bf16:
            return functional.linear(x.bfloat16(), weight.bfloat16()).float()
        return functional.linear(x, weight)

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
        return x * (x.square().mean(-1, keepdim=True) + _RMS_EPS).rsqrt() * self.weight[member]

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

    def forward(self, x: Tensor, *, bf16: bool = False, batch: Tensor | None = None) -> list[Tensor]:
        """(B, inputs) -> (B, outputs) for each member.

        With `batch` (3, channels) the BatchNorms use the statistics of x and leave them there; without it the running
        ones.
        """
        return [self._member(member, x, bf16, batch) for member in range(self.members)]

    def _member(self, member: int, x: Tensor, bf16: bool, batch: Tensor | None) -> Tensor:
        start = member * sum(self._widths)
        parts = torch.split(self.running[:, start : start + sum(self._widths)], self._widths, dim=1)
        noted: tuple[Tensor | None, ...] = (None,) * len(parts)
        if batch is not None:
            noted = torch.split(batch[:, start : start + sum(self._widths)], self._widths, dim=1)
        x = self.embedder(member, self.input_norm(member, x, parts[0], noted[0]), bf16)
        layers = zip(self.wide, self.wide_norms, self.narrow, self.narrow_norms, strict=True)
        for i, (wide, wide_norm, narrow, narrow_norm) in enumerate(layers):
            first, second = 1 + 2 * i, 2 + 2 * i
            y = wide_norm(member, wide(member, x, bf16), parts[first], noted[first]).relu()
            x = x + narrow_norm(member, narrow(member, y, bf16), parts[second], noted[second]).relu()
        head: Tensor = self.head(member, self.output_norm(member, x), bf16)
        return head + self.head_bias[member]

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
