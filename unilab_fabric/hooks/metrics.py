"""Writes every report to a Lightning logger."""

import inspect
from collections.abc import Mapping
from pathlib import Path

from lightning.fabric.loggers.logger import Logger
from typing_extensions import override

from unilab_fabric.config import ClassConfig, section_class
from unilab_fabric.hooks.hook import Hook, Run


class MetricsLogger(Hook):
    """Hands the job's metrics to a logger, on one rising axis: environment steps of the job."""

    def __init__(self, logger: Logger) -> None:
        self._logger = logger

    @override
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._logger.log_metrics(dict(metrics), step=run.env_steps)

    @override
    def on_end(self, run: Run, status: str) -> None:
        self._logger.finalize({"completed": "success", "stopped": "aborted"}.get(status, "failed"))


def build_logger(config: ClassConfig, folder: Path) -> Logger:
    """The configured logger; where it has a place for files and the configuration names none, the run folder."""
    logger_class = section_class("logger", config.class_path)
    arguments = dict(config.init_args)
    parameters = inspect.signature(logger_class).parameters
    for place in ("root_dir", "save_dir"):
        if place in parameters and arguments.get(place) is None:
            arguments[place] = str(folder)
            arguments |= {key: "" for key in ("name", "version") if key in parameters}  # no folders inside folders
            break
    logger: Logger = logger_class(**arguments)
    return logger
