"""Unitree Go2: names, stand pose and physics options of `go2.xml`, or of another MJCF with the same names."""

import math
from pathlib import Path

import mujoco

from unilab_fabric.envs.robots.model import Compile, Physics, PhysicsOptions, apply, choose, compiled

MJCF = Path(__file__).with_name("go2.xml")

LEGS = ("FL", "FR", "RL", "RR")
"""Front and rear, left and right: the order of everything that is counted by legs, the geom of the foot included."""
JOINTS = tuple(f"{leg}_{part}_joint" for leg in LEGS for part in ("hip", "thigh", "calf"))
"""Joint order: that of qpos, of qvel and, here, of the actuators too."""
ACTUATORS = tuple(name.removesuffix("_joint") for name in JOINTS)
FOOT_SENSORS = tuple(f"{leg}_pos" for leg in LEGS)

# m; from the maker's description.
HIP_X = 0.1934
THIGH = 0.213
FOOT_X, FOOT_Z = -0.002, -0.213  # of the foot sphere's centre in the calf's frame
FOOT_RADIUS = 0.022
CONTACT_MARGIN = 0.001
"""A foot touches the floor from this distance on [m]."""
IMU_B = (-0.02557, 0.0, 0.04232)
"""Where the inertial unit sits in the base frame [m]; its axes are the base's."""

FRONT_STAND = (0.0, 0.8, -1.5)
REAR_STAND = (0.0, 1.0, -1.5)
STAND_JOINTS = (*FRONT_STAND, *FRONT_STAND, *REAR_STAND, *REAR_STAND)
"""Joint angles of the stand pose [rad], which is also where actions are counted from."""


def _foot_b(hip_x: float, thigh: float, calf: float) -> tuple[float, float]:
    """x and z of a foot's centre in the base frame [m], hip straight; both hinges turn about y [rad]."""
    shank = thigh + calf
    x = hip_x - THIGH * math.sin(thigh) + FOOT_X * math.cos(shank) + FOOT_Z * math.sin(shank)
    z = -THIGH * math.cos(thigh) - FOOT_X * math.sin(shank) + FOOT_Z * math.cos(shank)
    return x, z


_FRONT, _REAR = _foot_b(HIP_X, *FRONT_STAND[1:]), _foot_b(-HIP_X, *REAR_STAND[1:])
STAND_PITCH = math.atan2(_FRONT[1] - _REAR[1], _FRONT[0] - _REAR[0])
"""Pitch [rad] at which all four feet touch the floor: the rear legs are bent further, so the nose is a little up."""
STAND_HEIGHT = FOOT_RADIUS + math.sin(STAND_PITCH) * _FRONT[0] - math.cos(STAND_PITCH) * _FRONT[1]
"""Height of the base then [m], 0.331. The usual 0.3 would start the feet 25 to 35 mm inside the floor, which throws
the robot up in its first steps; left to itself it sinks to about 0.309."""


PHYSICS: dict[Physics, PhysicsOptions] = {
    # For training: over six times as fast as the other (benchmarks/environment.py measures it), with all contacts kept.
    # Below 5 iterations the robot explodes.
    "fast": PhysicsOptions(
        timestep=0.01,
        substeps=2,
        cone=mujoco.mjtCone.mjCONE_PYRAMIDAL,
        impratio=1.0,
        foot_condim=3,
        tolerance=1e-5,
        iterations=10,
        ls_iterations=10,
        warm_start=False,
    ),
    # For judging: the robot description's own options at a step half as long as its training uses.
    "faithful": PhysicsOptions(
        timestep=0.005,
        substeps=4,
        cone=mujoco.mjtCone.mjCONE_ELLIPTIC,
        impratio=100.0,
        foot_condim=6,
        tolerance=1e-8,
        iterations=100,
        ls_iterations=50,
        warm_start=True,
    ),
}


def load(physics: Physics, mjcf: str | None = None, compile_spec: Compile | None = None) -> mujoco.MjModel:
    """The compiled model with these options.

    Args:
        physics: A key of `PHYSICS`.
        mjcf: MJCF file in place of the shipped one, with the names in this module.
        compile_spec: What makes a model of the description, to change it on the way.

    Raises UserError for options that do not exist, and for a file that is missing, does not compile or lacks a name.
    """
    options = choose(physics, PHYSICS)
    model = compiled(
        MJCF,
        mjcf,
        joints=JOINTS,
        actuators=ACTUATORS,
        sensors=FOOT_SENSORS,
        geoms=LEGS,
        compile_spec=compile_spec,
    )
    apply(model, options)
    for leg in LEGS:
        model.geom(leg).condim = options.foot_condim
    return model
