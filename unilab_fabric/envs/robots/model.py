"""What all robots share: solver options of a way to simulate one, and an MJCF file that is checked when loaded."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mujoco

from unilab_fabric.errors import UserError

Physics = Literal["fast", "faithful"]


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
) -> mujoco.MjModel:
    """The shipped model, or that of another MJCF file with these names, the free joint before the joints.

    Raises UserError for a file that is missing, does not compile or lacks a name.
    """
    if mjcf is None:
        return mujoco.MjModel.from_xml_path(str(shipped))
    try:
        model = mujoco.MjModel.from_xml_path(mjcf)
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


def _one_line(error: ValueError) -> str:
    return " ".join(str(error).split())
