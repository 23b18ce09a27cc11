"""Do all ranks hold the same replicated state, bit for bit?"""

from collections.abc import Mapping

import torch
from torch import Tensor

from unilab_fabric.parallel.reduce import Ranks

INTEGER_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class ReplicasDiffer(RuntimeError):
    """The replicated state is not the same on every rank; the message names the tensor groups and the ranks."""


def checksum(state: Mapping[str, Tensor]) -> Tensor:
    """Two wrapping integer sums of the bits of each tensor: (groups, 2) int64.

    Integer sums do not depend on the order of summation, so equal bits give equal sums on any device.
    """
    return torch.stack([_bit_sums(tensor) for tensor in state.values()])


def _bit_sums(tensor: Tensor) -> Tensor:
    bits = tensor.detach().reshape(-1).view(INTEGER_OF_SIZE[tensor.element_size()]).long()
    return torch.stack([bits.sum(), (bits * bits).sum()])


def check_replicas(state: Mapping[str, Tensor], ranks: Ranks, tick: int) -> None:
    """Compares the state of all ranks; collective, and the one place that waits for the device to do so.

    Raises ReplicasDiffer, on every rank, where a group differs from rank 0's.
    """
    if ranks.world_size == 1:
        return
    sums = ranks.gather(checksum(state), "checksums").cpu()
    differs = (sums != sums[0]).any(-1)
    problems = []
    for group, name in enumerate(state):
        others = differs[:, group].nonzero().flatten().tolist()
        if others:
            problems.append(f"{name} on rank {', '.join(map(str, others))}")
    if problems:
        raise ReplicasDiffer(f"tick {tick}: replicated state differs from rank 0's: {'; '.join(problems)}")


def nonfinite_groups(state: Mapping[str, Tensor]) -> list[str]:
    """Names of the tensors that hold a value that is not finite; waits for the device."""
    return [name for name, tensor in state.items() if tensor.is_floating_point() and not bool(tensor.isfinite().all())]
