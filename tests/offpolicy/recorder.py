"""A graph for the CPU: records operations with the very tensors they touch, and does them again on those tensors.

It refuses what a CUDA graph cannot hold, a value handed to the host and a tensor made of host data, and like a CUDA
graph it leaves everything as it was while it records, and afterwards knows addresses only.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from unilab_fabric.offpolicy.graphs import CaptureRefused

HOST_READS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_consecutive",
    "aten::_unique2",
}
"""Operations that hand a value of a tensor to the host, which on a GPU waits for everything before it."""
INDEXING = {"aten::index", "aten::index_put_", "aten::index_put"}
HOST_DATA = {"aten::lift_fresh", "aten::from_file"}
"""Operations that make a tensor of host data: a graph would hold a copy from memory that is long gone."""


def storage(tensor):
    return tensor.untyped_storage().data_ptr()


def tensors_in(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def written(function, args, kwargs):
    """The tensors among the arguments that an operation changes."""
    found = []
    for place, argument in enumerate(function._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[place] if place < len(args) else None)
            found += tensors_in(value)
    return found


class Recorder(TorchDispatchMode):
    """See the module; `generators` are restored after recording, as is everything that was there before."""

    def __init__(self, generators):
        super().__init__()
        self._generators = list(generators)
        self.operations = []
        self._made = {}  # by address, what the recording itself has made, kept alive as in a graph's pool
        self._before = {}  # by address, a tensor over the whole storage and what it held

    def capture(self, block):
        states = [generator.get_state() for generator in self._generators]
        try:
            with self:
                block()
        finally:
            for whole, held in self._before.values():
                whole.copy_(held)
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, results in self.operations:
                for result, value in zip(results, tensors_in(function(*args, **kwargs)), strict=True):
                    if result is not None:
                        result.copy_(value)

    def close(self):
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = function._schema.name
        if name in HOST_READS:
            raise CaptureRefused(f"{name} hands a value to the host")
        if name in INDEXING and any(index.dtype == torch.bool for index in tensors_in(args[1])):
            raise CaptureRefused(f"{name} by a mask hands the number of rows to the host")
        if name in HOST_DATA:
            raise CaptureRefused(f"{name} takes data from the host")
        changed = written(function, args, kwargs)
        for tensor in changed:
            self._save(tensor)
        out = function(*args, **kwargs)
        leaves = tensors_in(out)
        known = {storage(leaf) for leaf in tensors_in((args, kwargs))}
        fresh = [leaf for leaf in leaves if storage(leaf) not in known]
        for leaf in fresh:
            self._made[storage(leaf)] = leaf
        if fresh or changed:  # the others are views, which need not be made again
            results = [leaf if any(leaf is one for one in fresh) else None for leaf in leaves]
            self.operations.append((function, args, kwargs, results))
        return out

    def _save(self, tensor):
        address = storage(tensor)
        if address in self._made or address in self._before:
            return
        whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
        self._before[address] = (whole, whole.clone())
