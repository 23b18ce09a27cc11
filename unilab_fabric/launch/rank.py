"""One rank of a job: builds the parts on its device and runs the loop."""

import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from lightning.fabric import Fabric

from unilab_fabric.checkpoints import read_manifest
from unilab_fabric.config import RunConfig, build_learner_config, of_each_rank, to_plain
from unilab_fabric.errors import UserError
from unilab_fabric.hooks.evaluation import PeriodicEvaluation
from unilab_fabric.hooks.hook import Hook, HookFailed, Hooks
from unilab_fabric.hooks.metrics import MetricsLogger, build_logger
from unilab_fabric.hooks.progress import Progress
from unilab_fabric.hooks.summary import Summary
from unilab_fabric.launch.devices import Topology
from unilab_fabric.launch.failure import FailedAt
from unilab_fabric.launch.process import CONFIG
from unilab_fabric.launch.signals import StopSignals
from unilab_fabric.launch.strategy import open_fabric, second_store
from unilab_fabric.learners.learner import LearnerConfig
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.learners.precision import set_precision
from unilab_fabric.loop.collector import NONFINITE, Collector
from unilab_fabric.loop.runner import Runner
from unilab_fabric.parallel.calls import CallLog
from unilab_fabric.parallel.presence import Presence
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.shared import open_shared_sum

_SHARED_DISK_S = 10.0
"""Seconds [s] that a shared disk may take to show what another machine has written."""


def train_rank(
    config: RunConfig,
    topology: Topology,
    folder: Path,
    collector: Collector,
    signals: StopSignals,
    started_at: float,
) -> int:
    """Trains to the end; returns 0, or 128 plus the number of the signal that stopped the job.

    `started_at` is when the command was given, in seconds [s] since the epoch. Raises FailedAt from whatever ended the
    run once it had been built.
    """
    torch.set_num_threads(topology.learner_threads)
    torch.set_num_interop_threads(1)  # nothing of ours runs side by side inside torch
    torch.use_deterministic_algorithms(config.training.deterministic)
    fabric = open_fabric(topology, config.training.stall_timeout_s)
    if fabric.device.type == "cuda":
        _open_stream(fabric.device)
    if topology.started_by != "us":
        folder = _shared(Path(fabric.broadcast(str(folder))), fabric.global_rank)
    ranks = _ranks(config, topology, fabric)
    with ranks.doing("building its learner", "pauses"):
        runner, hooks = _build(config, topology, folder, collector, ranks, fabric.device, started_at)
    collector.note_faults_in(folder / NONFINITE)
    signals.stop_through(lambda number: runner.stop(signal.Signals(number).name, number))
    try:
        runner.run()
        runner.finish()
        ranks.barrier("end of the run")
        runner.close()
    except Exception as error:
        runner.stop_reason = str(error).partition("\n")[0]
        raise FailedAt(runner.tick, folder, partial(_end_hooks, runner, hooks)) from error
    if ranks.presence is not None:
        ranks.presence.close()
    return 128 + runner.stop_code if runner.stop_code > 1 else 0


def _end_hooks(runner: Runner, hooks: Hooks) -> None:
    """After a failure, of which another one would only distract."""
    try:
        hooks.on_end(runner, "failed")
    except HookFailed as another:
        print(f"warning: {another}", file=sys.stderr)


def _open_stream(device: torch.device) -> None:
    """All of this rank's work goes into one stream, which may be recorded into graphs as the default one may not."""
    torch.cuda.set_device(device)
    torch.cuda.set_stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _shared(folder: Path, rank: int) -> Path:
    """The run folder, once this machine sees it. Raises UserError where it does not."""
    deadline = time.monotonic() + _SHARED_DISK_S
    while not (folder / CONFIG).is_file():
        if time.monotonic() > deadline:
            where = f"rank {rank} on {socket.gethostname()} does not see {folder}, which rank 0 has made"
            raise UserError("training.log_root", folder.parent, f"{where}; allowed: a folder that all machines share")
        time.sleep(0.1)
    return folder


def _ranks(config: RunConfig, topology: Topology, fabric: Fabric) -> Ranks:
    if fabric.world_size == 1:
        return Ranks()
    rank, size, training = fabric.global_rank, fabric.world_size, config.training
    store, with_rank_0 = second_store(fabric)
    ranks = Ranks(
        rank,
        size,
        presence=Presence(
            rank,
            size,
            store,
            store_is_with_rank_0=with_rank_0,
            stall_timeout_s=training.stall_timeout_s,
            pause_timeout_s=training.pause_timeout_s,
        ),
        on_cuda=topology.accelerator == "cuda",
        gradient_wire=getattr(torch, training.gradient_wire),
        calls=CallLog(rank, size, second_store(fabric)[0], training.stall_timeout_s)
        if training.debug_collectives
        else None,
    )
    if training.shared_memory and topology.shares_memory:
        return replace(ranks, shared=open_shared_sum(rank, size, ranks.gather))
    return ranks


def _build(
    config: RunConfig,
    topology: Topology,
    folder: Path,
    collector: Collector,
    ranks: Ranks,
    device: torch.device,
    started_at: float,
) -> tuple[Runner, Hooks]:
    hooks = Hooks(_rank_zero_hooks(config, topology, folder, started_at) if ranks.rank == 0 else [])
    settings = build_learner_config(of_each_rank(config, ranks.world_size).learner)
    precision = config.training.precision
    runner = assembler(settings)(
        settings,
        collector,
        folder=folder,
        training=config.training,
        checkpoint=replace(config.checkpoint, keep_best=config.checkpoint.keep_best and not config.evaluation.episodes),
        manifest={"config": to_plain(config)},
        seed=config.seed,
        precision=set_precision(settings.auto_precision if precision == "auto" else precision, device),
        device=device,
        ranks=ranks,
        hooks=hooks,
    )
    if config.ckpt_path:
        warning = runner.resume(Path(config.ckpt_path))
        if warning and ranks.rank == 0:
            print(f"warning: {warning}", file=sys.stderr)
    return runner, hooks


def assembler(settings: LearnerConfig) -> Callable[..., Runner]:
    """What puts a rank together for this kind of learner; RSL-RL is loaded for its own runs only."""
    if isinstance(settings, PPO):
        from unilab_fabric.onpolicy.assemble import assemble

        return assemble
    from unilab_fabric.offpolicy.assemble import assemble as assemble_off_policy

    return assemble_off_policy


def _rank_zero_hooks(config: RunConfig, topology: Topology, folder: Path, started_at: float) -> list[Hook]:
    figures = asdict(topology) | {"world_size": topology.world_size}
    purge_step = read_manifest(Path(config.ckpt_path))["env_steps"] + 1 if config.ckpt_path else None
    name, build = config.logger.class_path.rpartition(".")[2], partial(build_logger, config.logger, folder, purge_step)
    logger = MetricsLogger(name, build)
    judge = PeriodicEvaluation(
        config.evaluation,
        cpus=sorted({cpu for cpus in topology.cpus for cpu in cpus}) if topology.pinned else None,
        keep_best=config.checkpoint.keep_best,
        report=logger.log,
    )
    summary = Summary(figures, config.seed, started_at)
    return [Progress(), *([judge] if config.evaluation.episodes else []), logger, summary]
