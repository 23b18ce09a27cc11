"""Reference motions: read from files, resampled, completed by forward kinematics, and checked.

A motion is what a robot's joints and bodies do at a fixed frame rate. Angles in rad, lengths in m, quaternions as
w, x, y, z; T frames, J joints, B bodies, the world not among them; _w is the world frame, velocities are those of the
bodies' frame origins.
"""

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from unilab_fabric.envs.quaternions import conjugate, multiply, of_roll_pitch_yaw
from unilab_fabric.errors import UserError

Numbers = NDArray[np.float64]

ARRAYS = ("joint_pos", "joint_vel", "body_pos_w", "body_quat_w", "body_lin_vel_w", "body_ang_vel_w")

FASTEST_JOINT = 40.0  # rad/s; the G1's fastest motors turn with 37
FASTEST_ROOT = 10.0  # m/s
DEEPEST = 0.03  # m under the floor
SPIN_ERROR = 1.0  # rad/s between the written angular velocity of the root and that of its turning


@dataclass(frozen=True, kw_only=True)
class Motion:
    """A motion of a robot."""

    fps: float
    """Frames a second."""
    joint_names: tuple[str, ...]
    body_names: tuple[str, ...]
    joint_pos: Numbers
    """(T, J)"""
    joint_vel: Numbers
    """(T, J)"""
    body_pos_w: Numbers
    """(T, B, 3)"""
    body_quat_w: Numbers
    """(T, B, 4)"""
    body_lin_vel_w: Numbers
    """(T, B, 3)"""
    body_ang_vel_w: Numbers
    """(T, B, 3)"""

    @property
    def frames(self) -> int:
        """T."""
        return len(self.joint_pos)

    @property
    def length_s(self) -> float:
        """From the first frame to the last [s]."""
        return (self.frames - 1) / self.fps


@dataclass(frozen=True, kw_only=True)
class Poses:
    """What a retargeted file holds: the root's pose and the joints' angles, frame by frame."""

    fps: float
    root_pos: Numbers
    """(T, 3)"""
    root_quat: Numbers
    """(T, 4)"""
    joint_pos: Numbers
    """(T, J)"""


# ---- the common npz layouts -----------------------------------------------------------------------------------------


def save_motion(motion: Motion, path: Path) -> None:
    """Writes an npz file, float32, with names."""
    arrays: dict[str, Any] = {name: getattr(motion, name).astype(np.float32) for name in ARRAYS}
    names: dict[str, Any] = {"joint_names": np.array(motion.joint_names), "body_names": np.array(motion.body_names)}
    np.savez_compressed(path, fps=np.array([motion.fps]), **arrays, **names)


def load_motion(path: Path, model: mujoco.MjModel, field: str = "task.motion") -> Motion:
    """Reads an npz file for this robot, its joints and bodies in the model's order.

    Joints and bodies are matched by names where the file has them. Otherwise joints must be the model's, with or
    without the root's seven columns in front, and bodies the model's, with or without the world. Raises UserError, of
    `field`, where the file is something else.
    """

    def refuse(told: str) -> UserError:
        return UserError(field, path, told)

    try:
        with np.load(path, allow_pickle=False) as file:
            given = {name: file[name] for name in file.files}
    except OSError as error:
        raise refuse(f"it cannot be read: {error.strerror or error}") from None
    except (ValueError, EOFError) as error:
        raise refuse(f"it is not an npz file of arrays: {str(error).splitlines()[0]}") from None
    missing = [name for name in ("fps", *ARRAYS) if name not in given]
    if missing:
        raise refuse(f"it has no {', '.join(missing)}; allowed: the keys fps, {', '.join(ARRAYS)}")
    joints, bodies = joint_names(model), body_names(model)
    picked_joints = _columns(given.get("joint_names"), given["joint_pos"].shape[1], joints, 7, "joint_pos", refuse)
    picked_rates = _columns(given.get("joint_names"), given["joint_vel"].shape[1], joints, 6, "joint_vel", refuse)
    picked_bodies = _columns(given.get("body_names"), given["body_pos_w"].shape[1], bodies, 1, "body_pos_w", refuse)
    frames = {name: given[name].shape[0] for name in ARRAYS}
    if len(set(frames.values())) > 1 or min(frames.values()) < 2:
        raise refuse(f"its arrays have {frames} frames; allowed: as many in each, two or more")
    picks = {"joint_pos": picked_joints, "joint_vel": picked_rates}
    arrays = {name: np.asarray(given[name][:, picks.get(name, picked_bodies)], np.float64) for name in ARRAYS}
    return Motion(fps=float(np.ravel(given["fps"])[0]), joint_names=joints, body_names=bodies, **arrays)


Refuse = Callable[[str], UserError]


def _columns(
    names: NDArray[np.str_] | None, count: int, wanted: tuple[str, ...], before: int, array: str, refuse: Refuse
) -> list[int]:
    """Where the wanted joints or bodies stand among `count` columns, of which the first `before` may be others."""
    if names is not None:
        found = [str(name) for name in names.tolist()]
        extra = count - len(found)
        absent = [name for name in wanted if name not in found]
        if absent:
            raise refuse(f"its names lack {', '.join(absent)}")
        if extra not in (0, before):
            raise refuse(f"its {array} has {count} columns for {len(found)} names")
        return [extra + found.index(name) for name in wanted]
    if count not in (len(wanted), len(wanted) + before):
        allowed = f"{len(wanted)} or {len(wanted) + before}, or names in the file"
        raise refuse(f"its {array} has {count} columns; allowed: {allowed}")
    return list(range(count - len(wanted), count))


def joint_names(model: mujoco.MjModel) -> tuple[str, ...]:
    """The model's joints behind the free one."""
    return tuple(model.joint(i).name for i in range(1, model.njnt))


def body_names(model: mujoco.MjModel) -> tuple[str, ...]:
    """The model's bodies without the world."""
    return tuple(model.body(i).name for i in range(1, model.nbody))


# ---- retargeted CSV -------------------------------------------------------------------------------------------------


def read_csv(path: Path, model: mujoco.MjModel, fps: float) -> Poses:
    """Reads root and joints, one frame a row, in one of two layouts; `fps` is the file's.

    Plain: root x, y, z [m], quaternion x, y, z, w, then the joints in the model's order [rad], with or without a header
    line. Named: a header with root_translateX, Y, Z [cm], root_rotateX, Y, Z [degrees, about fixed x, then y, then z]
    and `<joint>_dof` [degrees]. Raises UserError, naming the line, where it is neither.
    """
    try:
        with path.open(newline="") as file:
            rows = [row for row in csv.reader(file) if row]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("input", path, f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None
    names = joint_names(model)
    if rows and "root_translateX" in rows[0]:
        return _named_layout(path, rows, names, fps)
    first = 0 if rows and _is_number(rows[0][0]) else 1
    table = _table(path, rows[first:], first + 1, 7 + len(names))
    quat = table[:, [6, 3, 4, 5]]
    return Poses(fps=fps, root_pos=table[:, :3], root_quat=quat, joint_pos=table[:, 7:])


def _named_layout(path: Path, rows: list[list[str]], names: tuple[str, ...], fps: float) -> Poses:
    header = [name.strip() for name in rows[0]]
    root = [f"root_{kind}{axis}" for kind in ("translate", "rotate") for axis in "XYZ"]
    wanted = [*root, *(f"{name}_dof" for name in names)]
    absent = [name for name in wanted if name not in header]
    if absent:
        raise UserError("input", path, f"its header lacks {', '.join(absent)}")
    table = _table(path, rows[1:], 2, len(header))[:, [header.index(name) for name in wanted]]
    quat = np.asarray(of_roll_pitch_yaw(np.radians(table[:, 3:6])), np.float64)
    return Poses(fps=fps, root_pos=table[:, :3] / 100, root_quat=quat, joint_pos=np.radians(table[:, 6:]))


def _table(path: Path, rows: list[list[str]], first_line: int, columns: int) -> Numbers:
    if len(rows) < 2:
        raise UserError("input", path, "it has fewer than two frames")
    for line, row in enumerate(rows, first_line):
        if len(row) != columns:
            raise UserError("input", path, f"line {line} has {len(row)} columns; allowed: {columns}")
        for column, cell in enumerate(row, 1):
            if not _is_number(cell):
                raise UserError("input", path, f"line {line}, column {column} is {cell!r}; allowed: a finite number")
    return np.array(rows, np.float64)


def _is_number(cell: str) -> bool:
    try:
        return math.isfinite(float(cell))
    except ValueError:
        return False


# ---- from poses to a motion -----------------------------------------------------------------------------------------


def resample(poses: Poses, fps: float) -> Poses:
    """The same motion at another rate: positions and angles linearly, turns along the shorter arc (Shoemake 1985)."""
    quat = poses.root_quat / np.linalg.norm(poses.root_quat, axis=1, keepdims=True)
    count = math.floor((len(quat) - 1) * fps / poses.fps + 1e-9) + 1
    place = np.arange(count) * poses.fps / fps
    before = np.minimum(place.astype(int), len(quat) - 2)
    share = (place - before)[:, None]

    def linear(x: Numbers) -> Numbers:
        between: Numbers = x[before] * (1 - share) + x[before + 1] * share
        return between

    a, b = quat[before], quat[before + 1]
    b = np.where((a * b).sum(1, keepdims=True) < 0, -b, b)
    angle = np.arccos(np.clip((a * b).sum(1, keepdims=True), -1, 1))
    near = angle < 1e-6
    sine = np.where(near, 1.0, np.sin(angle))
    first = np.where(near, 1 - share, np.sin((1 - share) * angle) / sine)
    turned = first * a + np.where(near, share, np.sin(share * angle) / sine) * b
    turned /= np.linalg.norm(turned, axis=1, keepdims=True)
    return Poses(fps=fps, root_pos=linear(poses.root_pos), root_quat=turned, joint_pos=linear(poses.joint_pos))


def complete(poses: Poses, model: mujoco.MjModel) -> Motion:
    """Adds velocities, by central differences, and the bodies' poses and velocities, by forward kinematics."""
    root_vel = np.gradient(poses.root_pos, 1 / poses.fps, axis=0)
    joint_vel = np.gradient(poses.joint_pos, 1 / poses.fps, axis=0)
    spin_w = angular_velocity(poses.root_quat, poses.fps)
    data, frames, bodies = mujoco.MjData(model), len(poses.root_pos), model.nbody - 1
    found = {name: np.zeros((frames, bodies, size)) for name, size in zip(ARRAYS[2:], (3, 4, 3, 3), strict=True)}
    velocity, turn = np.zeros(6), np.zeros(9)
    for frame in range(frames):
        mujoco.mju_quat2Mat(turn, poses.root_quat[frame])
        data.qpos[:] = np.concatenate([poses.root_pos[frame], poses.root_quat[frame], poses.joint_pos[frame]])
        spin_b = turn.reshape(3, 3).T @ spin_w[frame]  # a free joint turns in the body's frame
        data.qvel[:] = np.concatenate([root_vel[frame], spin_b, joint_vel[frame]])
        mujoco.mj_forward(model, data)
        found["body_pos_w"][frame], found["body_quat_w"][frame] = data.xpos[1:], data.xquat[1:]
        for body in range(1, model.nbody):
            mujoco.mj_objectVelocity(model, data, mujoco.mjtObj.mjOBJ_XBODY, body, velocity, 0)
            found["body_ang_vel_w"][frame, body - 1] = velocity[:3]
            found["body_lin_vel_w"][frame, body - 1] = velocity[3:]
    return Motion(
        fps=poses.fps,
        joint_names=joint_names(model),
        body_names=body_names(model),
        joint_pos=poses.joint_pos,
        joint_vel=joint_vel,
        **found,
    )


def angular_velocity(quat: Numbers, fps: float) -> Numbers:
    """World-frame angular velocity (T, 3) [rad/s] of a turning frame (T, 4), over two frames, at the ends over one."""
    last = len(quat) - 1
    before, after = np.maximum(np.arange(len(quat)) - 1, 0), np.minimum(np.arange(len(quat)) + 1, last)
    change = multiply(quat[after], conjugate(quat[before]))
    change = np.where(change[:, :1] < 0, -change, change)
    sine = np.linalg.norm(change[:, 1:], axis=1, keepdims=True)
    angle = 2 * np.arctan2(sine, change[:, :1])
    axis = np.where(sine > 1e-12, change[:, 1:] / np.maximum(sine, 1e-12), 0.0)
    velocity: Numbers = axis * angle * fps / (after - before)[:, None]
    return velocity


# ---- is it a motion that the robot could make? ----------------------------------------------------------------------


def problems(motion: Motion, model: mujoco.MjModel, limit: int = 20) -> list[str]:
    """What is wrong with a motion and where, up to `limit` lines of each kind; none if it is fine."""
    return [line for check in _CHECKS for line in check(motion, model)[:limit]]


def _not_finite(motion: Motion, _: mujoco.MjModel) -> list[str]:
    return [
        f"frame {frame}: {name} is not finite"
        for name in ARRAYS
        for frame in np.flatnonzero(~np.isfinite(getattr(motion, name)).reshape(motion.frames, -1).all(1)).tolist()
    ]


def _not_unit(motion: Motion, _: mujoco.MjModel) -> list[str]:
    length = np.linalg.norm(motion.body_quat_w, axis=2)
    places = np.argwhere(np.abs(length - 1) > 1e-3).tolist()
    names = motion.body_names
    return [f"frame {t}: the quaternion of {names[b]} has the length {length[t, b]:.4f}, not 1" for t, b in places]


def _beyond_limits(motion: Motion, model: mujoco.MjModel) -> list[str]:
    limits = np.array([model.joint(name).range for name in motion.joint_names])
    low, high = motion.joint_pos < limits[:, 0] - 1e-3, motion.joint_pos > limits[:, 1] + 1e-3
    return [
        f"frame {t}: {motion.joint_names[j]} is {motion.joint_pos[t, j]:.3f} rad; "
        f"its range is {limits[j, 0]:.3f} to {limits[j, 1]:.3f}"
        for t, j in np.argwhere(low | high).tolist()
    ]


def _jumps(motion: Motion, _: mujoco.MjModel) -> list[str]:
    step = np.abs(np.diff(motion.joint_pos, axis=0)) * motion.fps
    root = np.linalg.norm(np.diff(motion.body_pos_w[:, 0], axis=0), axis=1) * motion.fps
    found = [
        f"frames {t} to {t + 1}: {motion.joint_names[j]} jumps, {step[t, j]:.0f} rad/s"
        for t, j in np.argwhere(step > FASTEST_JOINT).tolist()
    ]
    found += [f"frames {t} to {t + 1}: the root jumps, {root[t]:.0f} m/s" for t in np.flatnonzero(root > FASTEST_ROOT)]
    return found


def _wrong_spin(motion: Motion, _: mujoco.MjModel) -> list[str]:
    turned = angular_velocity(motion.body_quat_w[:, 0], motion.fps)
    error = np.linalg.norm(motion.body_ang_vel_w[:, 0] - turned, axis=1)
    if not np.isfinite(error).all() or error.mean() <= SPIN_ERROR:
        return []
    told = "as if a body-frame velocity had been taken for a world-frame one"
    return [f"the root's angular velocity is {error.mean():.1f} rad/s off its turning on average, {told}"]


def _under_the_floor(motion: Motion, model: mujoco.MjModel) -> list[str]:
    data = mujoco.MjData(model)
    found = []
    on_robot = np.flatnonzero((model.geom_bodyid > 0) & ((model.geom_contype | model.geom_conaffinity) > 0))
    for frame in range(motion.frames):
        root = [motion.body_pos_w[frame, 0], motion.body_quat_w[frame, 0], motion.joint_pos[frame]]
        data.qpos[:] = np.concatenate(root)
        if not np.isfinite(data.qpos).all():
            continue
        mujoco.mj_kinematics(model, data)
        lowest, geom = min((_lowest_point(model, data, geom), geom) for geom in on_robot.tolist())
        if lowest < -DEEPEST:
            found.append(f"frame {frame}: {model.geom(geom).name} is {-lowest:.3f} m under the floor")
    return found


def _lowest_point(model: mujoco.MjModel, data: mujoco.MjData, geom: int) -> float:
    """Height of the lowest point of a sphere or capsule [m]; of other shapes that of their bounding sphere's centre."""
    centre, kind, size = data.geom_xpos[geom, 2], model.geom_type[geom], model.geom_size[geom]
    if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
        return float(centre - size[0])
    if kind == mujoco.mjtGeom.mjGEOM_CAPSULE:
        return float(centre - size[0] - abs(data.geom_xmat[geom, 8]) * size[1])
    return float(centre)


_CHECKS = (_not_finite, _not_unit, _beyond_limits, _jumps, _wrong_spin, _under_the_floor)


def summary(motion: Motion) -> str:
    """A few lines on what a motion is."""
    low, high = motion.joint_pos.min(0), motion.joint_pos.max(0)
    busiest = np.argsort(low - high)[:5].tolist()
    travelled = np.linalg.norm(np.diff(motion.body_pos_w[:, 0, :2], axis=0), axis=1).sum()
    lines = [
        f"{motion.frames} frames at {motion.fps:g} a second, {motion.length_s:.2f} s; "
        f"{len(motion.joint_names)} joints, {len(motion.body_names)} bodies",
        f"root: height {motion.body_pos_w[:, 0, 2].min():.3f} to {motion.body_pos_w[:, 0, 2].max():.3f} m, "
        f"path {travelled:.2f} m",
    ]
    lines += [f"{motion.joint_names[j]}: {low[j]:.2f} to {high[j]:.2f} rad" for j in busiest]
    return "\n".join(lines)


def check_rates(names: Sequence[str], values: Sequence[float]) -> None:
    """Raises UserError for a frame rate that is none."""
    for name, value in zip(names, values, strict=True):
        if not 0 < value < math.inf:
            raise UserError(name, value, "allowed: more than 0 frames a second")
