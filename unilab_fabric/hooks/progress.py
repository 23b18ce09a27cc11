"""The one progress bar of a job."""

import sys
from collections.abc import Mapping
from typing import NoReturn

from tqdm import tqdm
from typing_extensions import override

from unilab_fabric.hooks.hook import Hook, Run

_SHOWN = {"Train/mean_reward": "return", "Train/mean_episode_length": "length"}
_LOG_FILE_INTERVAL_S = 10.0


class Progress(Hook):
    """Environment steps, their rate, the return and the time left, on standard error."""

    def __init__(self) -> None:
        self._newest: dict[str, str] = {}
        self._bar: tqdm[NoReturn] | None = None

    @override
    def on_start(self, run: Run) -> None:
        self._bar = tqdm(
            total=run.env_steps + (run.last_tick - run.tick) * run.env_steps_per_tick,
            initial=run.env_steps,
            unit=" env steps",
            unit_scale=True,
            smoothing=0.1,
            dynamic_ncols=True,
            mininterval=0.1 if sys.stderr.isatty() else _LOG_FILE_INTERVAL_S,
        )

    @override
    def on_log(self, run: Run, metrics: Mapping[str, float]) -> None:
        self._newest |= {label: f"{metrics[tag]:.2f}" for tag, label in _SHOWN.items() if tag in metrics}
        if self._bar is not None:
            self._bar.set_postfix(self._newest, refresh=False)
            self._bar.update(run.env_steps - self._bar.n)

    @override
    def on_end(self, run: Run, status: str) -> None:
        if self._bar is not None:  # a run may fail before its first tick
            self._bar.close()
