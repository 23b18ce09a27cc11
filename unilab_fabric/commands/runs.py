"""The commands that make a run of files, flags and checkpoints: fit and doctor."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from jsonargparse import ArgumentParser

from unilab_fabric.arguments import Tree, build, check_arguments, flat, shown
from unilab_fabric.checkpoints import find_checkpoint, saved_config
from unilab_fabric.commands.options import PROGRAM, help_text
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
from unilab_fabric.errors import Problems, UserError, UserErrors
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

_SECTION_HELP = tuple(f"{section}.help" for section in SECTIONS)
_Resolved = tuple[RunConfig, tuple[str, ...]]


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
    before, now = flat(saved), flat(to_plain(config))
    return [
        f"{name} {shown(before.get(name))} -> {shown(value)}"
        for name, value in now.items()
        if value != before.get(name)
    ]


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
    return help_text(parser)


def _run_help(command: str) -> str:
    from unilab_fabric.envs.registry import TASKS

    parser = ArgumentParser(
        prog=f"{PROGRAM} {command}",
        usage="%(prog)s [--config FILE] [--task NAME] [--name value ...]",
        description={"fit": fit, "doctor": doctor}[command].__doc__,
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
    return help_text(parser)
