"""Judges a run's checkpoints beside its loop: deterministic, on the faithful physics, by a process of its own.

Rank 0 starts the process as `python -m unilab_fabric.hooks.evaluation` and hands it one checkpoint at a time. It takes
the cores that are idle; training never waits for it before its end.
"""

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from typing_extensions import override

from unilab_fabric.config import EvaluationConfig
from unilab_fabric.evaluations import add_evaluation, best_evaluation, forget_evaluations
from unilab_fabric.hooks.hook import Hook, Run
from unilab_fabric.lifeline import die_with_parent
from unilab_fabric.loop.collector import NO_GRAPHICS

_NICENESS = 10
_ALONE = {"CUDA_VISIBLE_DEVICES": "", "MUJOCO_GL": NO_GRAPHICS, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class PeriodicEvaluation(Hook):
    """Has every checkpoint judged, or, where they are written faster than judged, the newest; keeps the best one."""

    def __init__(
        self,
        settings: EvaluationConfig,
        *,
        cpus: Sequence[int] | None,
        keep_best: bool,
        report: Callable[[Mapping[str, float], int], None],
    ) -> None:
        """Starts nothing yet.

        Args:
            settings: How checkpoints are judged.
            cpus: Cores that the process may use; None leaves the mask as it is.
            keep_best: Whether the best checkpoint is kept.
            report: Takes figures by tag and the environment steps of the job that they belong to.
        """
        self._settings = settings
        self._cpus = cpus
        self._keep_best = keep_best
        self._report = report
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._running: Path | None = None
        self._next: Path | None = None

    @override
    def on_start(self, run: Run) -> None:
        forget_evaluations(run.folder, run.tick)
        self._protect(run)

    @override
    def on_checkpoint(self, run: Run, path: Path) -> None:
        self._next = path
        self._go_on(run)

    @override
    def on_tick_end(self, run: Run) -> None:
        if not self._answers.empty():
            self._go_on(run)

    @override
    def on_end(self, run: Run, status: str) -> None:
        if status == "completed":
            end = time.monotonic() + self._settings.patience_s
            while self._running is not None and (left := end - time.monotonic()) > 0:
                try:
                    self._take(run, self._answers.get(timeout=left))
                except queue.Empty:
                    _warn(f"{self._running.name} was not judged within {self._settings.patience_s:g} s")
                    break
                self._go_on(run)
            best = best_evaluation(run.folder)
            if best is not None:
                figure = best["figures"]["return"]
                told = f"return {figure['mean']:.4g} ({figure['low']:.4g} to {figure['high']:.4g})"
                where = run.folder / "checkpoints" / best["checkpoint"]
                print(f"best checkpoint: {where}, {told}", file=sys.stderr, flush=True)
        self._end_process()
        self._running = self._next = None
        self._protect(run)

    def _go_on(self, run: Run) -> None:
        """Takes what the process has found, and gives it the newest checkpoint if it has nothing to do."""
        while not self._answers.empty():
            self._take(run, self._answers.get())
        if self._running is None and self._next is not None:
            self._running, self._next = self._next, None
            self._ask(self._running)
        self._protect(run)

    def _protect(self, run: Run) -> None:
        """Keeps the checkpoints that are being judged, will be, or are the best, from being removed."""
        best = best_evaluation(run.folder) if self._keep_best else None
        run.kept = {path for path in (self._running, self._next) if path is not None}
        if best is not None:
            run.kept.add(run.folder / "checkpoints" / best["checkpoint"])

    def _ask(self, path: Path) -> None:
        try:
            if self._process is None:
                self._process = self._start()
            assert self._process.stdin is not None
            self._process.stdin.write(f"{path}\n".encode())
            self._process.stdin.flush()
        except OSError as error:  # it has ended; its reader says so too
            self._answers.put({"error": f"it cannot be reached: {error.strerror}"})

    def _start(self) -> "subprocess.Popen[bytes]":
        read, write = os.pipe()
        cpus = "" if self._cpus is None else ",".join(map(str, self._cpus))
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), str(write), cpus, json.dumps(vars(self._settings))],
            pass_fds=[write],
            stdin=subprocess.PIPE,
            env={**os.environ, **_ALONE},
        )
        os.close(write)
        threading.Thread(target=self._read, args=(read,), name="evaluation", daemon=True).start()
        return process

    def _read(self, descriptor: int) -> None:
        with os.fdopen(descriptor) as lines:
            for line in lines:
                self._answers.put(json.loads(line))
        self._answers.put({"ended": True})

    def _take(self, run: Run, answer: dict[str, Any]) -> None:
        judged, self._running = self._running, None
        if "figures" in answer:
            add_evaluation(run.folder, answer)
            metrics = {f"Eval/{name}": figure["mean"] for name, figure in answer["figures"].items()}
            self._report(metrics, answer["env_steps"])
        elif judged is not None:
            reason = answer.get("error") or f"the process ended with status {self._process and self._process.wait()}"
            _warn(f"{judged.name} was not judged: {reason}")
        if "ended" in answer:  # the next checkpoint gets a new one
            self._end_process()

    def _end_process(self) -> None:
        """Whatever it is doing; it holds nothing that could be lost."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            with suppress(OSError):  # what could not be written any more
                process.stdin.close()  # type: ignore[union-attr]


def _warn(text: str) -> None:
    print(f"warning: evaluation: {text}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """The process: a checkpoint's folder on each line of its input, an answer in JSON on each line of its pipe."""
    parent, pipe, cpus, settings = argv
    die_with_parent(int(parent))
    if cpus:
        os.sched_setaffinity(0, map(int, cpus.split(",")))
    os.nice(_NICENESS)
    import torch

    from unilab_fabric.evaluation import evaluate

    torch.set_num_threads(1)
    arguments = {name: value for name, value in json.loads(settings).items() if name != "patience_s"}
    with os.fdopen(int(pipe), "w") as answers:
        for line in sys.stdin:
            path = Path(line.rstrip("\n"))
            try:
                answer = evaluate(path, num_threads=1, **arguments) | {"checkpoint": path.name}
            except Exception as error:  # a task or a learner of the user's may raise anything; training goes on
                answer = {"error": str(error).partition("\n")[0] or type(error).__name__}
            print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
