"""What all robots share: solver options of a way to simulate one, and an MJCF file that is checked when loaded."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mujoco

from unilab_fabric.errors import UserError

Physics = Literal["fast", "faithful"]

FLOOR = "floor"
"""Geom that terrain takes the place of."""

Compile = Callable[[mujoco.MjSpec], mujoco.MjModel]
"""Compiles a model; raises ValueError where it cannot."""


@dataclass(frozen=True, kw_only=True)
class PhysicsOptions:
    """Solver settings and step of a way to simulate a robot."""

    timestep: float
    """Physics step [s]."""
    substeps: int
    """Physics steps in one control step."""
    cone: mujoco.mjtCone
    """Friction cone."""
    impratio: float
    """Stiffness of friction over that of the normal direction."""
    foot_condim: int
    """Dimensions of a foot's contact: 3 has sliding friction, 6 turning and rolling too."""
    tolerance: float
    """Where the solver stops."""
    iterations: int
    """Most iterations of the solver."""
    ls_iterations: int
    """Most iterations of its line search."""
    warm_start: bool
    """Whether the solver starts from the step before."""


def choose(physics: Physics, known: Mapping[Physics, PhysicsOptions]) -> PhysicsOptions:
    """The options of that name. Raises UserError where there are none."""
    if physics not in known:
        raise UserError("task.physics", physics, f"allowed: {', '.join(known)}")
    return known[physics]


def apply(model: mujoco.MjModel, options: PhysicsOptions) -> None:
    """Sets everything but the feet's contacts, which each robot names its own way."""
    model.opt.timestep = options.timestep
    model.opt.cone = options.cone
    model.opt.impratio = options.impratio
    model.opt.tolerance = options.tolerance
    model.opt.iterations = options.iterations
    model.opt.ls_iterations = options.ls_iterations
    if not options.warm_start:
        model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_WARMSTART


def compiled(
    shipped: Path,
    mjcf: str | None,
    *,
    joints: tuple[str, ...],
    actuators: tuple[str, ...],
    sensors: tuple[str, ...],
    geoms: tuple[str, ...],
    compile_spec: Compile | None = None,
) -> mujoco.MjModel:
    """The shipped model, or that of another MJCF file with these names, the free joint before the joints.

    `compile_spec` changes the description on its way to a model; None takes it as it is.

    Raises UserError for a file that is missing, does not compile or lacks a name.
    """
    if mjcf is None:
        return _compile(str(shipped), compile_spec)
    try:
        model = _compile(mjcf, compile_spec)
    except ValueError as error:  # how MuJoCo reports a missing file and a mistake in one
        raise UserError("task.mjcf", mjcf, f"allowed: an MJCF file that compiles; {_one_line(error)}") from error
    needed: dict[str, tuple[Iterable[str], tuple[str, ...]]] = {
        "a free joint, then the joints": ((model.joint(i).name for i in range(1, model.njnt)), joints),
        "the actuators": ((model.actuator(i).name for i in range(model.nu)), actuators),
        "the sensors": ((model.sensor(i).name for i in range(model.nsensor)), sensors),
    }
    for what, (names, expected) in needed.items():
        found = tuple(names)
        if found[: len(expected)] != expected:
            raise UserError("task.mjcf", mjcf, f"allowed: {what} {', '.join(expected)}; it has {', '.join(found)}")
    there = {model.geom(i).name for i in range(model.ngeom)}
    if not there.issuperset(geoms):
        raise UserError("task.mjcf", mjcf, f"allowed: the foot geoms {', '.join(geoms)}; it has {', '.join(there)}")
    return model


def contract(
    model: mujoco.MjModel,
    robot: str,
    *,
    joints: tuple[str, ...],
    stand: tuple[float, ...],
    substeps: int,
    action_scale: float,
    observation: list[dict[str, Any]],
) -> dict[str, Any]:
    """The parts of a task's contract that follow from the robot, in joint order; angles in rad.

    `observation` are the terms of the actor's observation in their order: name, size, unit, frame, scale.
    """
    starts = [sum(term["size"] for term in observation[:i]) for i in range(len(observation))]
    servos = [model.actuator(i) for i in range(model.nu)]
    step = model.opt.timestep * substeps
    return {
        "robot": robot,
        "control": {"step_s": step, "rate_hz": round(1 / step), "physics_step_s": model.opt.timestep},
        "joints": {
            "names": list(joints),
            "default_rad": list(stand),
            "lower_rad": [float(model.joint(name).range[0]) for name in joints],
            "upper_rad": [float(model.joint(name).range[1]) for name in joints],
            "kp": [float(servo.gainprm[0]) for servo in servos],
            "kd": [
                float(-servo.biasprm[2] + model.joint(name).damping[0])
                for servo, name in zip(servos, joints, strict=True)
            ],
            "torque_limit_nm": [float(servo.forcerange[1]) for servo in servos],
        },
        "action": {
            "size": len(joints),
            "scale_rad": action_scale,
            "target": "joints.default_rad + action.scale_rad * action, held for control.step_s, by a servo "
            "kp * (target - angle) - kd * rate, limited to joints.torque_limit_nm",
        },
        "observation": [{"start": start, **term} for start, term in zip(starts, observation, strict=True)],
    }


def _compile(mjcf: str, compile_spec: Compile | None) -> mujoco.MjModel:
    if compile_spec is None:
        return mujoco.MjModel.from_xml_path(mjcf)
    return compile_spec(mujoco.MjSpec.from_file(mjcf))


def _one_line(error: ValueError) -> str:
    return " ".join(str(error).split())
