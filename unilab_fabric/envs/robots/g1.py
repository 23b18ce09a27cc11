"""Unitree G1 with 29 servos: names, stand pose and physics of `g1.xml`, or of another MJCF with the same names."""

from pathlib import Path

import mujoco

from unilab_fabric.envs.robots.model import FLOOR, Compile, Physics, PhysicsOptions, apply, choose, compiled

MJCF = Path(__file__).with_name("g1.xml")

SIDES = ("left", "right")
_LEG = ("hip_pitch", "hip_roll", "hip_yaw", "knee", "ankle_pitch", "ankle_roll")
_WAIST = ("waist_yaw", "waist_roll", "waist_pitch")
_ARM = ("shoulder_pitch", "shoulder_roll", "shoulder_yaw", "elbow", "wrist_roll", "wrist_pitch", "wrist_yaw")
PARTS = (
    *(f"{side}_{part}" for side in SIDES for part in _LEG),
    *_WAIST,
    *(f"{side}_{part}" for side in SIDES for part in _ARM),
)
"""Joints without the ending of their names: legs, waist, arms."""
JOINTS = tuple(f"{part}_joint" for part in PARTS)
"""Joint order: that of qpos, of qvel and of the actuators."""
FOOT_SENSORS = ("left_foot_pos", "right_foot_pos", "left_foot_quat", "right_foot_quat")
CORNERS = tuple(f"{side}_foot_contact_{corner}_geom" for side in SIDES for corner in range(4))
"""Geoms under the corners of the soles."""
FIRST_WAIST = PARTS.index("waist_yaw")
"""Where the waist's yaw, roll and pitch stand among the joints."""

IMU_PELVIS = (0.04525, 0.0, -0.08339)
"""Where the pelvis's inertial unit sits in its frame [m]; its axes are the pelvis's, as the torso unit's are the
torso's."""
FOOT_SITE = (0.04, 0.0, -0.037)
"""Where a foot's site sits in the ankle's frame [m]."""
CORNER_POINTS = ((-0.05, 0.025, -0.03), (-0.05, -0.025, -0.03), (0.12, 0.03, -0.03), (0.12, -0.03, -0.03))
"""Centres of a sole's corner spheres in the ankle's frame [m]."""
CORNER_RADIUS = 0.005
"""[m]"""

_STAND = {"hip_pitch": -0.312, "knee": 0.669, "ankle_pitch": -0.363, "shoulder_pitch": 0.2, "elbow": 0.6}
_STAND_SIDES = {"left_shoulder_roll": 0.2, "right_shoulder_roll": -0.2}


def _stand_angle(part: str) -> float:
    return _STAND_SIDES.get(part, _STAND.get(part.removeprefix("left_").removeprefix("right_"), 0.0))


STAND_JOINTS = tuple(_stand_angle(part) for part in PARTS)
"""Joint angles of the stand pose [rad], which is also where actions are counted from."""
STAND_HEIGHT = 0.757
"""Height of the pelvis at which the soles just touch the floor in it [m]; at the usual 0.754 they are 3 mm inside."""

CONTROL_STEP_S = 0.02

PHYSICS: dict[Physics, PhysicsOptions] = {
    # For training: soles stand on their four corners instead of seven capsules as well, and the solver stops earlier.
    "fast": PhysicsOptions(
        timestep=1 / 150,
        substeps=3,
        cone=mujoco.mjtCone.mjCONE_PYRAMIDAL,
        impratio=1.0,
        foot_condim=3,
        tolerance=1e-5,
        iterations=10,
        ls_iterations=10,
        warm_start=False,
    ),
    # For judging: the robot description's own options.
    "faithful": PhysicsOptions(
        timestep=1 / 150,
        substeps=3,
        cone=mujoco.mjtCone.mjCONE_PYRAMIDAL,
        impratio=1.0,
        foot_condim=3,
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
        actuators=JOINTS,
        sensors=FOOT_SENSORS,
        geoms=CORNERS,
        compile_spec=compile_spec,
    )
    apply(model, options)
    if physics == "fast":
        _stand_on_corners(model)
    return model


def _stand_on_corners(model: mujoco.MjModel) -> None:
    """Takes the capsules along the soles out of collision; the corners get their friction, which was the floor's."""
    for i in range(model.ngeom):
        geom = model.geom(i)
        if geom.name in CORNERS:
            geom.friction[0] = model.geom(FLOOR).friction[0]
        elif "_foot" in geom.name:
            geom.contype, geom.conaffinity = 0, 0
