"""The Fabric strategy: it gives ranks, devices and a process group, and leaves modules alone."""

import logging
import os
from datetime import timedelta

import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.strategies.ddp import DDPStrategy
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed import distributed_c10d
from torch.nn import Module
from typing_extensions import override

from unilab_fabric.errors import PeerLost
from unilab_fabric.launch.devices import Topology
from unilab_fabric.parallel.presence import REQUEST_TIMEOUT

_NO_DEADLINE = timedelta(days=365)


class RanksStrategy(DDPStrategy):
    """Data parallel ranks whose learners average their own flat gradients; no module is wrapped in DDP."""

    def __init__(self, timeout_s: float, cluster_environment: ClusterEnvironment | None) -> None:
        """`timeout_s` [s] bounds the rendezvous; None leaves it to Fabric who started the processes."""
        super().__init__(cluster_environment=cluster_environment, timeout=timedelta(seconds=timeout_s))
        self._backward_sync_control = None  # nothing is synchronised in backward

    @override
    def setup_module(self, module: Module) -> Module:  # type: ignore[override]
        return module


def open_fabric(topology: Topology, timeout_s: float) -> Fabric:
    """Fabric for this rank, launched: with one rank no process group, with more NCCL on CUDA and gloo on the CPU."""
    for package in ("lightning.fabric", "lightning.pytorch"):  # our banner has said what they would say
        logging.getLogger(package).setLevel(logging.WARNING)
    devices = list(topology.devices) if topology.accelerator == "cuda" else len(topology.devices)
    if topology.world_size == 1:
        return Fabric(accelerator=topology.accelerator, devices=devices)
    ours = LightningEnvironment() if topology.started_by == "us" else None
    fabric = Fabric(
        accelerator=topology.accelerator,
        devices=devices,
        num_nodes=topology.num_nodes,
        strategy=RanksStrategy(timeout_s, ours),
    )
    try:
        fabric.launch()
    except RuntimeError as error:  # torch raises no narrower kind where a rank does not join
        raise PeerLost(f"rank {topology.rank}: the process group could not form: {error}") from error
    if fabric.world_size != topology.world_size:
        raise RuntimeError(f"the job has {fabric.world_size} ranks and not {topology.world_size}")
    if topology.accelerator == "cpu":
        # who is late is judged by what the ranks say of themselves (parallel/presence.py), not by gloo's clock
        distributed_c10d._set_pg_timeout(_NO_DEADLINE, torch.distributed.group.WORLD)
    return fabric


def second_store(fabric: Fabric) -> tuple[Store, bool]:
    """Another client of the rendezvous store, with a short deadline, and whether rank 0 keeps that store."""
    environment = fabric.strategy.cluster_environment  # type: ignore[attr-defined]
    store = TCPStore(
        environment.main_address,
        environment.main_port,
        is_master=False,
        wait_for_workers=False,
        timeout=REQUEST_TIMEOUT,
    )
    return store, os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def close_fabric() -> None:
    """Leaves the process group, if there is one; a process that ends inside it may abort."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
