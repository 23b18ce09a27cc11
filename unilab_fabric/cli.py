"""The command line: fit, evaluate, play, export, motion, tasks, doctor, rsl_rl; arguments in, exit status out.

Bad input is one line on standard error for each problem, and exit status 2, before anything has started.
"""

import inspect
import json
import os
import platform
import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

from jsonargparse import ArgumentParser

from unilab_fabric import __version__
from unilab_fabric.arguments import Tree, build, check_arguments, shown
from unilab_fabric.checkpoints import find_checkpoint, read_manifest, saved_config
from unilab_fabric.config import (
    LEARNERS,
    LOGGERS,
    SECTIONS,
    JobConfig,
    RunConfig,
    TrainingConfig,
    dump_run_config,
    not_settable,
    resolve_run,
    section_class,
    to_plain,
)
from unilab_fabric.errors import Problems, UserError, UserErrors, nearest
from unilab_fabric.sources import (
    Flag,
    find_config,
    flags_to_tree,
    overlay,
    parse_flags,
    preset_of,
    read_files,
    shipped_overlays,
    shipped_presets,
)

PROGRAM = "python -m unilab_fabric"

_SECTION_HELP = tuple(f"{section}.help" for section in SECTIONS)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit status, 2 for bad input."""
    tokens = list(sys.argv[1:] if argv is None else argv)
    if not tokens or tokens[0] in ("-h", "--help"):
        print(_overview())
        return 0 if tokens else 2
    if tokens[0] == "--version":
        print(__version__)
        return 0
    try:
        if tokens[0] not in COMMANDS:
            raise UserError("command", tokens[0], nearest(tokens[0], COMMANDS))
        return COMMANDS[tokens[0]](["--help" if token == "-h" else token for token in tokens[1:]])
    except UserError as problem:
        return _refuse([problem])
    except UserErrors as several:
        return _refuse(several.problems)
    except KeyboardInterrupt:  # before a run has begun there is nothing to end in good order
        return 128 + signal.SIGINT


def fit(tokens: Sequence[str]) -> int:
    """Train a policy."""
    from unilab_fabric.launch.preflight import NUMPY_VARIABLES, preflight, without_graphics

    os.environ.update(NUMPY_VARIABLES)  # before NumPy is loaded
    with without_graphics():
        resolved = _resolve_run("fit", tokens)
        if resolved is None:
            return 0
        config, notes = resolved
        plan = preflight(config, notes)
    from unilab_fabric.launch.job import run_job

    return run_job(config, plan)


def doctor(tokens: Sequence[str]) -> int:
    """Say what a run would use, or why it cannot start; takes the arguments of fit."""
    from unilab_fabric.launch.preflight import banner, preflight, without_graphics

    with without_graphics():
        resolved = _resolve_run("doctor", tokens, default_preset="sac")
        if resolved is None:
            return 0
        print(banner(preflight(*resolved)))
    versions = [f"{name} {version(name)}" for name in ("torch", "lightning", "mujoco", "mjbatch", "gymnasium", "numpy")]
    print(f"  versions   python {platform.python_version()}, {', '.join(versions)}")
    return 0


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
    options = _options("evaluate", EvaluateOptions, evaluate.__doc__, tokens)
    if options is None:
        return 0
    path = find_checkpoint(options.ckpt_path, log_root=Path("runs"), run_name=None)
    read_manifest(path)
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
    options = _options("export", ExportOptions, export.__doc__, tokens)
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
    viewer: bool = False
    """Show it in MuJoCo's own window instead; needs a display."""
    seconds: float = 10.0
    """Length [s]."""
    width: int = 640
    """Width of the frames."""
    height: int = 480
    """Height of the frames."""
    physics: Literal["faithful", "fast"] = "faithful"
    """Physics to play on."""
    seed: int = 1
    """Seed of the start and the command."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds <= 600:
            raise UserError("seconds", self.seconds, "allowed: more than 0, at most 600")
        for name in ("width", "height"):
            if not 64 <= getattr(self, name) <= 4096 or getattr(self, name) % 2:
                raise UserError(name, getattr(self, name), "allowed: even numbers from 64 to 4096")
        if self.output is not None:
            if Path(self.output).suffix not in (".mp4", ".gif", ".png"):
                raise UserError("output", self.output, "allowed: a name that ends in .mp4, .gif or .png")
            if not Path(self.output).absolute().parent.is_dir():
                raise UserError("output", self.output, "allowed: a file in a folder that is there")


def play(tokens: Sequence[str]) -> int:
    """Show a trained policy: a film without a display, or a window."""
    options = _options("play", PlayOptions, play.__doc__, tokens)
    if options is None:
        return 0
    path = find_checkpoint(options.ckpt_path, log_root=Path("runs"), run_name=None)
    if not options.viewer and not os.environ.get("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # read when MuJoCo is loaded
    from unilab_fabric import playback

    playing = playback.Playing(path, physics=options.physics, seed=options.seed, episode_s=options.seconds + 1.0)
    if options.viewer:
        playback.show_in_viewer(playing)
        return 0
    output = Path(options.output) if options.output else path.parents[1] / "play" / f"{path.name}.mp4"
    output.parent.mkdir(exist_ok=True)
    frames = playback.record(playing, output, seconds=options.seconds, width=options.width, height=options.height)
    print(f"{output}: {frames} frame{'s' if frames > 1 else ''} of {playing.title}")
    return 0


@dataclass(frozen=True, kw_only=True)
class MotionOptions:
    """What `motion` takes, behind convert, check or info."""

    input: str
    """convert: a retargeted CSV file. check and info: a motion in npz."""
    output: str | None = None
    """convert: the npz file to write."""
    input_fps: float = 30.0
    """convert: frames a second of the CSV file."""
    output_fps: float = 50.0
    """convert: frames a second of the motion; tasks read one in each control step, so 50."""
    robot: Literal["g1"] = "g1"
    """The robot."""
    mjcf: str | None = None
    """MJCF file in place of the shipped robot, with the same names."""


def motion(tokens: Sequence[str]) -> int:
    """Convert, check or describe a reference motion: motion convert, motion check, motion info."""
    action = tokens[0] if tokens else "--help"
    if action in ("convert", "check", "info"):
        tokens = tokens[1:]
    elif action != "--help":
        raise UserError("motion", action, nearest(action, ["convert", "check", "info"]))
    options = _options("motion", MotionOptions, motion.__doc__, tokens or ["--help"])
    if options is None:
        return 0
    if action == "convert" and options.output is None:
        raise UserError("output", "missing", "allowed: the npz file to write")
    from unilab_fabric.envs import motions
    from unilab_fabric.envs.robots import g1

    motions.check_rates(("input_fps", "output_fps"), (options.input_fps, options.output_fps))
    model, source = g1.load("faithful", options.mjcf), Path(options.input)
    if action == "convert":
        poses = motions.read_csv(source, model, options.input_fps)
        found = motions.complete(motions.resample(poses, options.output_fps), model)
    else:
        found = motions.load_motion(source, model, "input")
    print(motions.summary(found))
    wrong = [] if action == "info" else motions.problems(found, model)
    for line in wrong:
        print(f"error: {source}: {line}", file=sys.stderr)
    if action == "convert" and options.output is not None:
        motions.save_motion(found, Path(options.output))
        print(f"{options.output}: written" + (", with the problems above" if wrong else ""))
    return 2 if wrong else 0


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
    options = _options("rsl_rl", RslRlOptions, rsl_rl.__doc__, tokens)
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


def tasks(tokens: Sequence[str]) -> int:
    """List the tasks, one line each."""
    if [token for token in tokens if token != "--help"]:
        raise UserError("argument", tokens[0], "tasks takes none")
    from unilab_fabric.envs.registry import describe_tasks

    lines = describe_tasks()
    width = max(len(name) for name, _ in lines)
    for name, line in lines:
        print(f"{name:<{width}}  {line}")
    print(f"{'gymnasium:ID':<{width}}  Any environment registered with Gymnasium, Box observations and actions.")
    return 0


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "fit": fit,
    "evaluate": evaluate,
    "tasks": tasks,
    "doctor": doctor,
    "play": play,
    "export": export,
    "motion": motion,
    "rsl_rl": rsl_rl,
}


_Resolved = tuple[RunConfig, tuple[str, ...]]


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


Options = TypeVar("Options")


def _options(command: str, cls: type[Options], description: str | None, tokens: Sequence[str]) -> Options | None:
    """The arguments of a command that takes those of a dataclass; None once its help has been shown."""
    problems = Problems()
    flags = parse_flags(tokens, problems, switches=["help"])
    if any(flag.name == "help" for flag in flags):
        parser = ArgumentParser(prog=f"{PROGRAM} {command}", description=description)
        parser.add_class_arguments(cls, None)
        print(_format(parser))
        return None
    settings = check_arguments(cls, flags_to_tree(flags), "", problems)
    problems.raise_any()
    options: Options = build(cls, settings)
    return options


def _resolve_run(command: str, tokens: Sequence[str], default_preset: str | None = None) -> _Resolved | None:
    """The run that a command line asks for and notes on it; None where it asks for a text, which is printed."""
    problems = Problems()
    flags = parse_flags(tokens, problems, switches=["help", "print_config"], optional=_SECTION_HELP)
    not_settings = {"config", "print_config", "help", *_SECTION_HELP}
    request = _RunRequest(
        files=tuple(flag.text or "" for flag in flags if flag.name == "config"),
        flags=flags_to_tree(flag for flag in flags if flag.name not in not_settings),
        problems=problems,
    )
    for flag in flags:
        if flag.name in ("help", *_SECTION_HELP):
            print(_help(command, flag, request.flags))
            return None
    resolved = request.resolve(default_preset)
    if any(flag.name == "print_config" for flag in flags):
        print(dump_run_config(resolved[0]), end="")
        return None
    return resolved


@dataclass(frozen=True, kw_only=True)
class _RunRequest:
    """What the command line of fit or doctor asks for, settings not yet checked."""

    files: tuple[str, ...]
    flags: Tree
    problems: Problems

    def resolve(self, default_preset: str | None = None) -> _Resolved:
        """The whole run, and notes on where its settings came from.

        `default_preset` stands in where neither a file nor a task is named. Raises UserErrors.
        """
        given = overlay(read_files(self.files, self.problems), self.flags)
        if given.get("ckpt_path"):
            return self._continued(given)
        preset = None if self.files else preset_of(given["task"]) if "task" in given else default_preset
        if preset is None:
            return self._checked(given), ()
        given = overlay(read_files([preset], self.problems), given)
        return self._checked(given), (f"no --config was given: settings start from {find_config(preset).name}",)

    def _continued(self, given: Tree) -> _Resolved:
        """The run of a checkpoint, in its own folder and with its own settings under the given ones."""
        saved: Tree = {}
        with self.problems.gathered():
            saved = _settings_of_checkpoint(given)
        if not saved:
            self._checked({key: value for key, value in given.items() if key != "ckpt_path"})
        config = self._checked(overlay(saved, {**given, "ckpt_path": saved["ckpt_path"]}))
        return config, tuple(f"changed from the checkpoint's run: {change}" for change in _changes(saved, config))

    def _checked(self, tree: Tree) -> RunConfig:
        try:
            config = resolve_run(tree)
        except UserErrors as several:
            # a file or a checkpoint that could not be read would have named the task
            unknown_task = bool(self.problems.found) and "task" not in tree
            self.problems.found += [each for each in several.problems if not (unknown_task and each.field == "task")]
            _check_devices(tree, self.problems)
        self.problems.raise_any()
        return config


def _check_devices(tree: Tree, problems: Problems) -> None:
    """The devices of a run whose settings have problems elsewhere, so that both are told at once."""
    own = Problems()
    training = tree.get("training") or {}
    if not isinstance(training, Mapping):
        return
    settings = check_arguments(TrainingConfig, training, "training", own)
    if not own.found:
        from unilab_fabric.launch.devices import resolve_topology

        with problems.gathered():
            resolve_topology(build(TrainingConfig, settings))


def _settings_of_checkpoint(given: Tree) -> Tree:
    """The settings of the run that a checkpoint belongs to, with `ckpt_path` and the run's folder as they are now."""
    training = given.get("training")
    training = training if isinstance(training, Mapping) else {}
    path = find_checkpoint(
        str(given["ckpt_path"]),
        log_root=Path(str(training.get("log_root", TrainingConfig().log_root))),
        run_name=str(training["run_name"]) if training.get("run_name") else None,
    )
    saved: Tree = {**saved_config(path), "ckpt_path": str(path)}
    if path.parent.name == "checkpoints":
        folder = path.parent.parent
        saved["training"] |= {"log_root": str(folder.parent), "run_name": folder.name}
    return saved


def _changes(saved: Tree, config: RunConfig) -> list[str]:
    """Settings that differ from the saved ones, one line each."""
    before, now = _flat(saved), _flat(to_plain(config))
    return [
        f"{name} {shown(before.get(name))} -> {shown(value)}"
        for name, value in now.items()
        if value != before.get(name)
    ]


def _flat(tree: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = path if key == "init_args" else f"{path}.{key}".removeprefix(".")
        flat |= _flat(value, name) if isinstance(value, Mapping) else {name: value}
    return flat


# help


def _overview() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {inspect.getdoc(command)}" for name, command in COMMANDS.items()]
    return "\n".join([f"usage: {PROGRAM} COMMAND ...", "", *lines, "", f"{PROGRAM} COMMAND --help tells more."])


def _help(command: str, flag: Flag, given: Tree) -> str:
    """Help on a command, or on the arguments of one task, learner or logger."""
    if flag.name == "help":
        return _run_help(command)
    section = next(section for section in SECTIONS if flag.name == f"{section}.help")
    name = flag.text or given.get(section, {}).get("class_path")
    if not name:
        raise UserError(flag.name, "without a value", f"allowed: --{flag.name} NAME")
    cls = section_class(section, str(name))
    parser = ArgumentParser(prog=f"{PROGRAM} {command} --{section} {name}", usage="%(prog)s ...", add_help=False)
    parser.add_class_arguments(cls, section, skip=set(not_settable(cls)), fail_untyped=False)
    return _format(parser)


def _run_help(command: str) -> str:
    from unilab_fabric.envs.registry import TASKS

    parser = ArgumentParser(
        prog=f"{PROGRAM} {command}",
        usage="%(prog)s [--config FILE] [--task NAME] [--name value ...]",
        description=inspect.getdoc(COMMANDS[command]),
    )
    presets = ", ".join(f"{name}.yaml" for name in shipped_presets())
    presets += f"; to be laid over one of these: {', '.join(f'{name}.yaml' for name in shipped_overlays())}"
    parser.add_argument(
        "--config",
        metavar="FILE",
        help=f"YAML file, or a shipped preset: {presets}. May be repeated: the later wins, and flags win over all.",
    )
    parser.add_argument("--print_config", action="store_true", help="Print the resolved configuration and end.")
    parser.add_argument("--devices", metavar="DEVICES", help="Short for --training.devices.")
    for section, text in {
        "task": f"What to learn: {', '.join(TASKS)}, gymnasium:ID, or the import path of a VectorEnv class.",
        "learner": f"How to learn: {', '.join(LEARNERS)}, or the import path of a LearnerConfig.",
        "logger": f"Where metrics go: {', '.join(LOGGERS)}, or the import path of a Lightning logger.",
    }.items():
        parser.add_argument(f"--{section}", metavar="NAME", help=text)
        parser.add_argument(
            f"--{section}.help", metavar="NAME", help=f"Show its arguments, which are given as --{section}.ARGUMENT."
        )
    parser.add_class_arguments(JobConfig, None)
    return _format(parser)


def _format(parser: ArgumentParser) -> str:
    """The help text, without what jsonargparse's own command line would offer and ours does not."""
    text = parser.format_help()
    for absent in (
        r"^  --\S+ CONFIG\s+Path to a configuration file\.\n",
        r", --\S+\+ \S+",
        r"\s+\(default: (null|False)\)",
    ):
        text = re.sub(absent, "", text, flags=re.MULTILINE)
    return text


def _refuse(problems: Iterable[UserError]) -> int:
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 2
