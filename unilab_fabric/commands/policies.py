"""The commands on a trained policy: evaluate, play, export, rsl_rl."""

import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from unilab_fabric.arguments import Tree
from unilab_fabric.checkpoints import find_checkpoint, saved_config, verify
from unilab_fabric.commands.options import command_options
from unilab_fabric.config import resolve_run
from unilab_fabric.errors import Problems, UserError
from unilab_fabric.sources import flags_to_tree, parse_flags

_FILM_S = 10.0
_LONGEST_FILM_S = 600.0
_SHOWN_EPISODE_S = 20.0
_VIEWER = "window"


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """What `evaluate` takes."""

    ckpt_path: str
    """Checkpoint to evaluate: its folder, its run's folder (the newest one), or `last` for the newest under runs/."""
    episodes: int = 128
    """Episodes, one in each of as many environments."""
    episode_s: float = 10.0
    """Length of an episode [s]."""
    physics: Literal["faithful", "fast"] = "faithful"
    """Physics to judge on: the options of the source model, or those of training."""
    seed: int = 1
    """Seed of the evaluation's environments and commands."""
    json: str | None = None
    """File to write the figures to as well, as JSON."""

    def __post_init__(self) -> None:
        if self.episodes < 1:
            raise UserError("episodes", self.episodes, "allowed: 1 or more")
        if not self.episode_s > 0:
            raise UserError("episode_s", self.episode_s, "allowed: more than 0 seconds")
        if self.json is not None and not Path(self.json).absolute().parent.is_dir():
            raise UserError("json", self.json, "allowed: a file in a folder that is there")


def evaluate(tokens: Sequence[str]) -> int:
    """Judge a trained policy: deterministic, on the faithful physics; --task.KEY VALUE changes its task."""
    tokens, overrides = _task_flags(tokens)
    options = command_options("evaluate", EvaluateOptions, evaluate.__doc__, tokens)
    if options is None:
        return 0
    path = find_checkpoint(options.ckpt_path, log_root=Path("runs"), run_name=None)
    verify(path)
    from unilab_fabric import evaluation

    result = evaluation.evaluate(
        path,
        episodes=options.episodes,
        episode_s=options.episode_s,
        physics=options.physics,
        seed=options.seed,
        overrides=overrides,
    )
    print(evaluation.format_table(result))
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n")
    return 0


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What `export` takes."""

    ckpt_path: str
    """Checkpoint to export: its folder, its run's folder (the newest one), or `last` for the newest under runs/."""
    output: str | None = None
    """Folder for the files; null takes `export` in the run's folder."""


def export(tokens: Sequence[str]) -> int:
    """Write a policy for a robot's program: ONNX, TorchScript and a JSON contract."""
    options = command_options("export", ExportOptions, export.__doc__, tokens)
    if options is None:
        return 0
    path = find_checkpoint(options.ckpt_path, log_root=Path("runs"), run_name=None)
    folder = path.parents[1] / "export" if options.output is None else Path(options.output)
    if folder.exists() and not folder.is_dir():
        raise UserError("output", folder, "allowed: a folder")
    from unilab_fabric import exporting

    contract = exporting.export(path, folder)
    print(f"{folder}: {', '.join([exporting.ONNX, exporting.TORCHSCRIPT, exporting.CONTRACT])}")
    print(f"  {contract['learner']} for {contract['robot']} at {contract['control']['rate_hz']} Hz, from {path}")
    return 0


@dataclass(frozen=True, kw_only=True)
class PlayOptions:
    """What `play` takes."""

    ckpt_path: str
    """Checkpoint to play: its folder, its run's folder (the newest one), or `last` for the newest under runs/."""
    output: str | None = None
    """File to write: .mp4, .gif, or .png for the last frame; null takes `play/<tick>.mp4` in the run's folder."""
    viewer: Literal["window", "web"] | None = None
    """Show it instead: in MuJoCo's own window, which needs a display and is what --viewer alone means, or on a page for
    the browser."""
    port: int = 8080
    """Port of the page; 0 takes a free one."""
    host: str = "127.0.0.1"
    """Address at which the page is served."""
    seconds: float | None = None
    """Length [s]; null is 10 s of a film, and a viewer until it is closed."""
    width: int = 640
    """Width of the frames."""
    height: int = 480
    """Height of the frames."""
    physics: Literal["faithful", "fast"] = "faithful"
    """Physics to play on."""
    seed: int = 1
    """Seed of the start and the command."""

    def __post_init__(self) -> None:
        if self.seconds is not None and not 0 < self.seconds <= (_LONGEST_FILM_S if self.viewer is None else math.inf):
            raise UserError("seconds", self.seconds, f"allowed: more than 0, in a film at most {_LONGEST_FILM_S:g}")
        if not 0 <= self.port < 65_536:
            raise UserError("port", self.port, "allowed: 0 to 65535")
        for name in ("width", "height"):
            if not 64 <= getattr(self, name) <= 4096 or getattr(self, name) % 2:
                raise UserError(name, getattr(self, name), "allowed: even numbers from 64 to 4096")
        if self.output is not None:
            if Path(self.output).suffix not in (".mp4", ".gif", ".png"):
                raise UserError("output", self.output, "allowed: a name that ends in .mp4, .gif or .png")
            if not Path(self.output).absolute().parent.is_dir():
                raise UserError("output", self.output, "allowed: a file in a folder that is there")


def play(tokens: Sequence[str]) -> int:
    """Show a trained policy: a film without a display, MuJoCo's window, or a page for the browser."""
    tokens = [f"--viewer={_VIEWER}" if alone else token for token, alone in zip(tokens, _alone(tokens), strict=True)]
    options = command_options("play", PlayOptions, play.__doc__, tokens)
    if options is None:
        return 0
    path = find_checkpoint(options.ckpt_path, log_root=Path("runs"), run_name=None)
    if options.viewer != "window" and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is loaded
    from unilab_fabric.play.playing import Playing

    seconds = _FILM_S if options.seconds is None else options.seconds
    length = seconds + 1.0 if options.viewer is None else _SHOWN_EPISODE_S
    playing = Playing(path, physics=options.physics, seed=options.seed, episode_s=length)
    if options.viewer == "window":
        from unilab_fabric.play import window

        window.show(playing, options.seconds)
        return 0
    if options.viewer == "web":
        from unilab_fabric.play.web import WebView

        view = WebView(playing, host=options.host, port=options.port)
        until = "Ctrl+C ends it" if options.seconds is None else f"for {options.seconds:g} s"
        print(f"{view.url}: {playing.title}, {until}", flush=True)
        view.run(options.seconds)
        view.close()
        return 0
    from unilab_fabric.play import film

    output = Path(options.output) if options.output else path.parents[1] / "play" / f"{path.name}.mp4"
    output.parent.mkdir(exist_ok=True)
    frames = film.record(playing, output, seconds=seconds, width=options.width, height=options.height)
    print(f"{output}: {frames} frame{'s' if frames > 1 else ''} of {playing.title}")
    return 0


def _alone(tokens: Sequence[str]) -> list[bool]:
    """Which of the tokens is a `--viewer` without a value."""
    following = [*tokens[1:], "--"]
    return [token == "--viewer" and after.startswith("-") for token, after in zip(tokens, following, strict=True)]


@dataclass(frozen=True, kw_only=True)
class RslRlOptions:
    """What `rsl_rl` takes."""

    ckpt_path: str
    """Checkpoint of a PPO run: its folder, its run's folder (the newest one), or `last` for the newest under runs/."""
    output: str
    """File to write, by custom model_<iteration>.pt."""

    def __post_init__(self) -> None:
        if not Path(self.output).absolute().parent.is_dir():
            raise UserError("output", self.output, "allowed: a file in a folder that is there")


def rsl_rl(tokens: Sequence[str]) -> int:
    """Write a PPO checkpoint as RSL-RL's runner would have written it."""
    options = command_options("rsl_rl", RslRlOptions, rsl_rl.__doc__, tokens)
    if options is None:
        return 0
    path = find_checkpoint(options.ckpt_path, log_root=Path("runs"), run_name=None)
    config = resolve_run(saved_config(path))
    if config.learner.class_path != "PPO":
        raise UserError("ckpt_path", path, f"its learner is {config.learner.class_path}; allowed: a run of PPO")
    from unilab_fabric.onpolicy.rsl_rl_files import write_checkpoint

    iteration = write_checkpoint(path, config, Path(options.output))
    print(f"{options.output}: iteration {iteration} of {path}")
    return 0


def _task_flags(tokens: Sequence[str]) -> tuple[list[str], Tree]:
    """The tokens without those of `--task.KEY`, and the arguments of the task that these give."""
    problems = Problems()
    flags = parse_flags(tokens, problems, switches=["help"])
    problems.raise_any()
    of_task = [flag for flag in flags if flag.name.startswith("task.")]
    others = [flag for flag in flags if flag not in of_task]
    rest = [f"--{flag.name}" if flag.text is None else f"--{flag.name}={flag.text}" for flag in others]
    arguments: Tree = flags_to_tree(of_task).get("task", {}).get("init_args", {})
    return rest, arguments
