"""Tasks by name: the shipped ones, a class of the user's by import path, or a Gymnasium id."""

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from gymnasium.envs.registration import register
from gymnasium.vector import VectorEnv

from unilab_fabric.envs.vector_env import TaskEnv
from unilab_fabric.errors import UserError, nearest

TASKS = {
    "CartpoleSwingup": "unilab_fabric.envs.tasks.cartpole.CartpoleSwingup",
    "G1MotionTracking": "unilab_fabric.envs.tasks.g1_motion.G1MotionTracking",
    "G1WalkFlat": "unilab_fabric.envs.tasks.g1_walk.G1WalkFlat",
    "Go2JoystickFlat": "unilab_fabric.envs.tasks.go2_joystick.Go2JoystickFlat",
}
"""Short name and import path of each shipped task."""

GYMNASIUM = "gymnasium:"
"""Before the id of an environment registered with Gymnasium, as in `gymnasium:Pendulum-v1`."""


def describe_tasks() -> list[tuple[str, str]]:
    """Name and first docstring line of each shipped task."""
    return [(name, (inspect.getdoc(_import_class(path)) or "").split("\n")[0]) for name, path in TASKS.items()]


def task_class(name_or_path: str) -> type[VectorEnv[Any, Any, Any]]:
    """The class of a task, for its constructor's signature.

    Args:
        name_or_path: A name in `TASKS`, the import path of a VectorEnv class, or `gymnasium:<id>`.

    Raises UserError for a name that leads nowhere; an error inside a user's module is left as it is.
    """
    if name_or_path.startswith(GYMNASIUM):
        from unilab_fabric.envs.gymnasium_env import gymnasium_task  # not needed for tasks of ours

        env_id = name_or_path.removeprefix(GYMNASIUM)
        if ":" in env_id:  # Gymnasium's own way to name the module that registers an environment
            _import_module(env_id.split(":")[0], name_or_path)
        return gymnasium_task(env_id)
    if name_or_path in TASKS:
        return _import_class(TASKS[name_or_path])
    if "." not in name_or_path:
        raise UserError("task", name_or_path, nearest(name_or_path, TASKS))
    return _import_class(name_or_path)


def make_task(class_path: str, init_args: Mapping[str, Any], *, seed: int, num_threads: int) -> TaskEnv:
    """Builds a task from plain values, as a configuration holds them.

    Args:
        class_path: As for `task_class`.
        init_args: Arguments of the constructor; where it takes a dataclass, a mapping of its fields will do.
        seed: Seed of the environments. A foreign environment gets it at its first reset.
        num_threads: Physics threads, 0 for all allowed cores; a foreign environment is not told.

    Raises UserError for an argument the task does not have or does not allow.
    """
    cls = task_class(class_path)
    arguments = _typed_arguments(cls, init_args, "task")
    if issubclass(cls, TaskEnv):
        return cls(**{**arguments, "seed": seed, "num_threads": num_threads})
    from unilab_fabric.envs.gymnasium_env import AdaptedTask

    return AdaptedTask(cls(**arguments), name=cls.__name__, seed=seed)


def register_with_gymnasium() -> None:
    """Makes the shipped tasks known to `gymnasium.make_vec` as `unilab_fabric/<name>-v0`."""
    for name, path in TASKS.items():
        module, _, attribute = path.rpartition(".")
        register(id=f"unilab_fabric/{name}-v0", vector_entry_point=f"{module}:{attribute}")


def _import_class(path: str) -> type[VectorEnv[Any, Any, Any]]:
    module_path, _, attribute = path.rpartition(".")
    module = _import_module(module_path, path)
    known = {name: value for name, value in vars(module).items() if _is_vector_env(value)}
    if attribute not in known:
        raise UserError("task", path, f"allowed: a VectorEnv class of {module_path}; {nearest(attribute, known)}")
    cls: type[VectorEnv[Any, Any, Any]] = known[attribute]
    return cls


def _import_module(module_path: str, task: str) -> ModuleType:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_path}.".startswith(f"{error.name}."):
            raise  # the module is there; something it imports is not
        raise UserError("task", task, f"allowed: {_allowed_tasks()}; there is no module {error.name}") from error


def _allowed_tasks() -> str:
    """What `task` may be, for an error about an import path."""
    return f"one of {', '.join(TASKS)}, the import path of a VectorEnv class, or {GYMNASIUM}<id>"


def _is_vector_env(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, VectorEnv)


def _typed_arguments(cls: type, given: Mapping[str, Any], field: str) -> dict[str, Any]:
    """The arguments for a class's constructor, mappings turned into the dataclasses and lists into the tuples it takes.

    Raises UserError for one it does not take.
    """
    parameters = inspect.signature(cls, eval_str=True).parameters
    open_ended = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    arguments = {}
    for name, value in given.items():
        if name not in parameters and not open_ended:
            raise UserError(f"{field}.{name}", value, nearest(name, parameters))
        kind = parameters[name].annotation if name in parameters else None
        arguments[name] = _typed(kind, value, f"{field}.{name}")
    return arguments


def _typed(kind: Any, value: Any, field: str) -> Any:
    for option in typing.get_args(kind) or [kind]:
        if isinstance(option, type) and dataclasses.is_dataclass(option) and isinstance(value, Mapping):
            return option(**_typed_arguments(option, value, field))
    if typing.get_origin(kind) is tuple and isinstance(value, list):
        return tuple(value)
    return value
