"""The estimate of a learner's memory, which is made without torch, against what its tensors take."""

import dataclasses

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.learners.problems import CPU, batch
from unilab_fabric.learners import operations
from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.flash_sac.layers import FlashNet
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec


class Peak(TorchDispatchMode):
    """The most bytes that stood in storages made within it, at any moment."""

    def __init__(self):
        super().__init__()
        self._live = {}
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        self._live = {key: (ref, size) for key, (ref, size) in self._live.items() if not ref.expired()}
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            storage = tensor.untyped_storage()
            if storage._cdata not in given:
                self._live.setdefault(storage._cdata, (StorageWeakRef(storage), storage.nbytes()))
        self.bytes = max(self.bytes, sum(size for _, size in self._live.values()))
        return out


@pytest.fixture
def as_on_an_accelerator(monkeypatch):
    """All members at once, and no CPU kernels."""
    monkeypatch.setattr(operations, "member_by_member", operations.batched)
    monkeypatch.setattr(FlashNet, "forward", lambda self, x, a=None, *, batch=None: self.batched(x, a, batch=batch))


SIZES = {"Go2": (49, 52, 12), "G1": (98, 101, 29)}
LEARNERS = {
    "FastSAC": FastSAC(kernels="off", actor_every=1),
    "FastSAC, small": FastSAC(kernels="off", actor_every=1, actor_hidden=(256, 128, 64), critic_hidden=(256, 128, 64)),
    "FlashSAC": FlashSAC(kernels="off", actor_every=1),
    "FlashSAC, small": FlashSAC(kernels="off", actor_every=1, actor_width=64, critic_width=96, blocks=1),
}


@pytest.mark.usefixtures("as_on_an_accelerator")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("robot", SIZES)
@pytest.mark.parametrize("name", LEARNERS)
def test_the_estimate_is_near_what_the_state_and_an_update_take(name, robot, precision):
    actor, critic, actions = SIZES[robot]
    limits = {"action_low": (-1.0,) * actions, "action_high": (1.0,) * actions}
    spec = TaskSpec(name=robot, num_envs=64, actor_size=actor, critic_size=critic, metrics=(), **limits)
    settings = dataclasses.replace(LEARNERS[name], batch_size=1024)
    learner = settings.build(spec, CPU, precision, Ranks(), 1, 100)
    transitions = batch(spec, rows=1024)
    learner.update(transitions, 0)
    with Peak() as peak:
        learner.update(transitions, 0)
    gradients = learner.actor_flat.reduced.nbytes + learner.critic_flat.reduced.nbytes
    held = sum(tensor.nbytes for tensor in learner.replicated.values()) + gradients + peak.bytes
    assert settings.memory_bytes(spec, precision) == pytest.approx(held, rel=0.12)
