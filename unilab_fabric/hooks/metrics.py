"""Writes every report to a Lightning logger, beside the loop."""

import inspect
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from lightning.fabric.loggers.logger import Logger
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from typing_extensions import override

from unilab_fabric.config import ClassConfig, section_class
from unilab_fabric.hooks.hook import Hook, Run

_NOTICE_S = 10.0
_DRAIN_S = 30.0
_STATUS = {"completed": "success", "stopped": "aborted", "failed": "failed"}
"""Lightning's words for how a run ended."""


class MetricsLogger(Hook):
    """Hands the job's metrics to a logger, on one rising axis: environment steps of the job.

    The logger has a thread of its own, so one that waits for a server holds nobody up: its reports wait for it. What
    it raises ends the job at the next report.
    """

    def __init__(self, name: str, build: Callable[[], Logger]) -> None:
        """`build` makes the logger, in the thread; `name` is what messages call it."""
        self._name = name
        self._reports: queue.SimpleQueue[tuple[Mapping[str, float], int] | str] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._ready = threading.Event()
        self._notice_at = time.monotonic() + _NOTICE_S
        self._thread = threading.Thread(target=self._run, args=(build,), name="logger", daemon=True)
        self._thread.start()

    @override
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        self.log(metrics, run.env_steps)
        if not self._ready.is_set() and time.monotonic() > self._notice_at:
            self._notice_at = float("inf")
            self._warn(f"has not started within {_NOTICE_S:.0f} s; training goes on, and its reports wait")

    def log(self, metrics: Mapping[str, float], env_steps: int) -> None:
        """Hands over figures that belong to so many environment steps of the job."""
        self._raise_any()
        self._reports.put((dict(metrics), env_steps))

    @override
    def on_end(self, run: Run, status: str) -> None:
        self._reports.put(status)
        self._thread.join(_DRAIN_S)
        if self._thread.is_alive():
            self._warn(f"did not take {self._reports.qsize()} messages within {_DRAIN_S:.0f} s; they are lost")
        self._raise_any()

    def _run(self, build: Callable[[], Logger]) -> None:
        """The thread: whatever the logger raises is kept for the loop."""
        try:
            logger = build()
            self._ready.set()
            while not isinstance(report := self._reports.get(), str):
                metrics, step = report
                logger.log_metrics(dict(metrics), step=step)
            logger.finalize(_STATUS[report])
        except Exception as error:
            self._error = error

    def _raise_any(self) -> None:
        if self._error is not None:
            raise self._error

    def _warn(self, text: str) -> None:
        print(f"warning: the logger {self._name} {text}", file=sys.stderr, flush=True)


def build_logger(config: ClassConfig, folder: Path, purge_step: int | None = None) -> Logger:
    """The configured logger; where it has a place for files and the configuration names none, the run folder.

    What a killed run reported after the checkpoint that this one continues from, at `purge_step` environment steps or
    later, is dropped by the loggers that can.
    """
    logger_class = section_class("logger", config.class_path)
    arguments = dict(config.init_args)
    parameters = inspect.signature(logger_class).parameters
    for place in ("root_dir", "save_dir"):
        if place in parameters and arguments.get(place) is None:
            arguments[place] = str(folder)
            arguments |= {key: "" for key in ("name", "version") if key in parameters}  # no folders inside folders
            break
    if purge_step is not None and ("purge_step" in parameters or issubclass(logger_class, TensorBoardLogger)):
        arguments["purge_step"] = purge_step  # TensorBoard's own word; Lightning hands it on
    logger: Logger = logger_class(**arguments)
    return logger
