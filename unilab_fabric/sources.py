"""Where a run's settings come from: presets, configuration files and flags, the later over the earlier.

Environment variables are no source: what configures a run can be read from its command line and files.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unilab_fabric.arguments import FlagText, Tree, read_flag
from unilab_fabric.config import BY_CLASS, SECTIONS, Section, class_name, read_config_file, section_class
from unilab_fabric.errors import Problems, UserError, nearest

SHORT_FLAGS = {"devices": "training.devices"}
"""Short names of settings on the command line."""

PRESET_OF_TASK = {
    "CartpoleSwingup": "cartpole",
    "G1MotionTracking": "sac_g1_motion_tracking",
    "G1WalkFlat": "sac_g1_walk_flat",
    "Go2JoystickFlat": "sac",
}
"""The shipped preset a task starts from where the command line names no configuration file."""
PRESET_OF_GYMNASIUM = "gymnasium"


@dataclass(frozen=True)
class Flag:
    """One `--name value`; a switch has no value."""

    name: str
    text: str | None


def parse_flags(
    tokens: Sequence[str], problems: Problems, *, switches: Iterable[str] = (), optional: Iterable[str] = ()
) -> list[Flag]:
    """`--name value` and `--name=value`, in order; `switches` stand without a value, `optional` ones may."""
    flags: list[Flag] = []
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        name, equals, text = token.removeprefix("--").partition("=")
        if not token.startswith("--"):
            problems.add("argument", token, "allowed: --name value")
        elif equals:
            flags.append(Flag(name, text))
        elif name in switches:
            flags.append(Flag(name, None))
        elif rest and not rest[0].startswith("--"):
            flags.append(Flag(name, rest.pop(0)))
        elif name in optional:
            flags.append(Flag(name, None))
        else:
            problems.add(name, "without a value", f"allowed: --{name} VALUE")
    return flags


def flags_to_tree(flags: Iterable[Flag]) -> Tree:
    """Settings from flags with dotted names, nested; `--task.num_envs` means `task.init_args.num_envs`."""
    tree: Tree = {}
    for flag in flags:
        path = SHORT_FLAGS.get(flag.name, flag.name).split(".")
        if path[0] in SECTIONS:
            if len(path) == 1:
                path.append("class_path")
            elif path[1] not in ("class_path", "init_args"):
                path.insert(1, "init_args")
        _put(tree, path, FlagText(flag.text or ""))
    return tree


def overlay(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> Tree:
    """Settings of `upper` over those of `lower`; a section that names another class starts without arguments."""
    merged = dict(lower)
    for key, value in upper.items():
        if key in SECTIONS:
            merged[key] = _overlay_section(key, merged.get(key), value)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = overlay(merged[key], value)
        else:
            merged[key] = value
    return merged


def find_config(name: str) -> Path:
    """The file `name`, or else the shipped preset of that name. Raises UserError where there is neither."""
    if Path(name).is_file():
        return Path(name)
    presets = shipped_presets() | shipped_overlays()
    if name.removesuffix(".yaml") in presets:
        return presets[name.removesuffix(".yaml")]
    raise UserError("config", name, f"there is no such file, nor such a preset; {nearest(name, presets)}")


def shipped_presets() -> dict[str, Path]:
    """The presets that come with the package, by name: whole runs."""
    return {path.stem: path for path in sorted(_configs().glob("*.yaml"))}


def shipped_overlays() -> dict[str, Path]:
    """Files that come with the package to be laid over a preset, by name."""
    return {path.stem: path for path in sorted((_configs() / "overlays").glob("*.yaml"))}


def _configs() -> Path:
    package = Path(__file__).parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"  # an installed wheel, or a checkout


def read_files(names: Iterable[str], problems: Problems) -> Tree:
    """All configuration files, the later over the earlier; adds a problem for each that cannot be read."""
    tree: Tree = {}
    for name in names:
        with problems.gathered():
            tree = overlay(tree, read_config_file(find_config(name)))
    return tree


def preset_of(task: Any) -> str | None:
    """The preset for a task as a tree names it; None for a class of the user's, or where no task is named."""
    name = class_name("task", str(task.get("class_path") if isinstance(task, Mapping) else task))
    return PRESET_OF_GYMNASIUM if name.startswith("gymnasium:") else PRESET_OF_TASK.get(name)


def _overlay_section(section: Section, lower: Any, upper: Any) -> Any:
    lower, upper = _as_class(lower), _as_class(upper)
    if not isinstance(lower, Mapping) or not isinstance(upper, Mapping):
        return _for_its_class(section, upper)
    name = upper.get("class_path", lower.get("class_path"))
    if BY_CLASS in lower and name is not None:  # a file that was laid before the class was named
        lower = _for_its_class(section, {**lower, "class_path": name})
    names = [class_name(section, str(part["class_path"])) for part in (lower, upper) if "class_path" in part]
    if len(set(names)) > 1:
        return _for_its_class(section, upper)
    own = {key: value for key, value in upper.items() if key != BY_CLASS}
    given = {BY_CLASS: upper[BY_CLASS]} if BY_CLASS in upper else {}
    return _for_its_class(section, {**overlay(lower, own), **given})


def _for_its_class(section: Section, given: Any) -> Any:
    """A section with those of its `by_class` arguments that its class takes; as it is, where no class is named yet.

    Raises UserError for a class that is not known.
    """
    if not isinstance(given, Mapping) or BY_CLASS not in given:
        return given
    by_class = given[BY_CLASS]
    if not isinstance(by_class, Mapping):
        told = "allowed: a mapping from names of classes to their arguments"
        raise UserError(f"{section}.{BY_CLASS}", by_class, told)
    arguments = {class_name(section, str(name)): own for name, own in by_class.items()}
    for name in arguments:
        section_class(section, name)
    if "class_path" not in given:
        return given
    rest = {key: value for key, value in given.items() if key != BY_CLASS}
    own = arguments.get(class_name(section, str(given["class_path"])))
    return rest if own is None else overlay(rest, {"init_args": own})


def _as_class(given: Any) -> Any:
    return {"class_path": given} if isinstance(given, str) else given


def _put(tree: Tree, path: Sequence[str], value: FlagText) -> None:
    for name in path[:-1]:
        below = tree.get(name)
        if isinstance(below, FlagText):
            below = read_flag(below)
        tree[name] = below if isinstance(below, dict) else {}
        tree = tree[name]
    tree[path[-1]] = value
