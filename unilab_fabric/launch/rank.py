"""One rank of an off-policy job: builds the parts on its device and runs the loop."""

import signal
from dataclasses import asdict
from pathlib import Path
from types import FrameType

import torch

from unilab_fabric.config import RunConfig, build_learner_config, to_plain
from unilab_fabric.hooks.hook import Hook, Hooks
from unilab_fabric.hooks.metrics import MetricsLogger, build_logger
from unilab_fabric.hooks.progress import Progress
from unilab_fabric.hooks.summary import Summary
from unilab_fabric.launch.devices import Topology
from unilab_fabric.launch.strategy import open_fabric
from unilab_fabric.learners.precision import resolve_precision
from unilab_fabric.offpolicy.assemble import assemble
from unilab_fabric.offpolicy.collector import Collector
from unilab_fabric.offpolicy.runner import OffPolicyRunner
from unilab_fabric.parallel.reduce import Ranks


def train_rank(config: RunConfig, topology: Topology, folder: Path, collector: Collector, started_at: float) -> int:
    """Trains to the end; returns 0, or 128 plus the number of the signal that stopped the job."""
    torch.set_num_threads(topology.learner_threads)
    torch.use_deterministic_algorithms(config.training.deterministic)
    fabric = open_fabric(topology, config.training.stall_timeout_s)
    ranks = Ranks(fabric.global_rank, fabric.world_size)
    if topology.started_by != "us":
        folder = Path(fabric.broadcast(str(folder)))
    runner, hooks = _build(config, topology, folder, collector, ranks, fabric.device, started_at)
    with _StopOnSignal(runner):
        try:
            runner.run()
        except BaseException:  # a second Ctrl+C too: whatever ends the run, its summary says so
            hooks.on_end(runner, "failed")
            raise
    hooks.on_end(runner, "stopped" if runner.stop_code else "completed")
    ranks.barrier("end of the run")
    return 128 + runner.stop_code if runner.stop_code > 1 and ranks.rank == 0 else 0


def _build(
    config: RunConfig,
    topology: Topology,
    folder: Path,
    collector: Collector,
    ranks: Ranks,
    device: torch.device,
    started_at: float,
) -> tuple[OffPolicyRunner, Hooks]:
    hooks = Hooks(_rank_zero_hooks(config, topology, folder, started_at) if ranks.rank == 0 else [])
    runner = assemble(
        build_learner_config(config.learner),
        collector,
        folder=folder,
        training=config.training,
        checkpoint=config.checkpoint,
        manifest={"config": to_plain(config)},
        seed=config.seed,
        precision=resolve_precision(device.type) if config.training.precision == "auto" else config.training.precision,
        device=device,
        ranks=ranks,
        hooks=hooks,
    )
    if config.ckpt_path:
        warning = runner.resume(Path(config.ckpt_path))
        if warning and ranks.rank == 0:
            print(f"warning: {warning}")
    return runner, hooks


def _rank_zero_hooks(config: RunConfig, topology: Topology, folder: Path, started_at: float) -> list[Hook]:
    figures = asdict(topology) | {"world_size": topology.world_size}
    return [
        Progress(),
        MetricsLogger(build_logger(config.logger, folder)),
        Summary(figures, config.seed, started_at),
    ]


class _StopOnSignal:
    """While it is entered, SIGINT and SIGTERM ask the run to stop; a second one ends the process at once."""

    def __init__(self, runner: OffPolicyRunner) -> None:
        self._runner = runner
        self._asked = False

    def __enter__(self) -> None:
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, _: FrameType | None) -> None:
        if self._asked:
            raise SystemExit(128 + number)
        self._asked = True
        self._runner.stop(signal.Signals(number).name, number)
