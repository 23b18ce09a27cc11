"""mjbatch behind names: state rows, joints, a floating base, sensors, warning counters.

Everything here is numpy over `mjbatch.Batch`; nothing asks MuJoCo for an extra forward pass.
"""

import os
from collections.abc import Sequence
from typing import Any

import mjbatch
import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from unilab_fabric.envs.vector_env import Array, Ids, Mask
from unilab_fabric.errors import UserError

Rows = NDArray[np.float64]

# Entries of a rotation matrix, row by row, from the products of a quaternion's entries ww, wx, wy, wz, xw, ..., zz.
_ROTATION_OF_PRODUCTS = np.array(
    [
        # ww wx wy wz xw xx xy xz yw yx yy yz zw zx zy zz
        [1, 0, 0, 0, 0, 1, 0, 0, 0, 0, -1, 0, 0, 0, 0, -1],
        [0, 0, 0, -2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 2, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, -1, 0, 0, 0, 0, 1, 0, 0, 0, 0, -1],
        [0, -2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0],
        [0, 0, -2, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0],
        [1, 0, 0, 0, 0, -1, 0, 0, 0, 0, -1, 0, 0, 0, 0, 1],
    ],
    np.float32,
)

_DIVERGENCE = slice(mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADCTRL + 1)


class Simulations:
    """N simulations of one model, stepped together on a pool of threads.

    `state`, `qpos`, `qvel`, `motion` and `ctrl` are views of the simulations' own state: what is written there counts
    at the next step.
    """

    state: Rows
    """(N, nstate): whole integration states, warm start included."""
    qpos: Rows
    """(N, nq)"""
    qvel: Rows
    """(N, nv)"""
    motion: Rows
    """(N, nq + nv): qpos and qvel side by side."""
    ctrl: Rows
    """(N, nu)"""

    def __init__(self, model: mujoco.MjModel, num_envs: int, *, substeps: int, num_threads: int) -> None:
        """Copies the model, which is edited before.

        Args:
            model: The compiled model, solver options included.
            num_envs: N.
            substeps: Physics steps in one control step.
            num_threads: Threads, 0 for as many as this process may use cores.

        Raises UserError for a negative number of threads.
        """
        if num_threads < 0:
            raise UserError("task.num_threads", num_threads, "allowed: 0 (all allowed cores) or more")
        _silence_mujoco()
        self.model = model
        self.substeps = substeps
        """Physics steps in one control step."""
        self._batch = mjbatch.Batch(model, num_envs, num_threads=num_threads or allowed_cores())
        self.num_threads = self._batch.num_threads
        self._batch.reset()
        self.state = self._batch.bind("state")
        self.qpos = self._batch.bind("qpos")
        self.qvel = self._batch.bind("qvel")
        start = mujoco.mj_stateSize(model, mujoco.mjtState.mjSTATE_TIME)  # positions, then velocities follow the time
        self.motion = self.state[:, start : start + model.nq + model.nv]
        self.ctrl = self._batch.bind("ctrl")
        self._warnings = self._batch.bind("warning")
        self._divergence = self._warnings[:, _DIVERGENCE, 1]
        self._pristine = self.state[0].copy()
        self.mutable: dict[str, NDArray[Any]] = {"physics/state": self.state}
        """Live arrays that make up the simulations, for `TaskEnv.mutable`."""

    def step(self) -> Mask | None:
        """One control step of all simulations; those that diverged, if any.

        MuJoCo puts a diverged simulation back to the model's reference state without a word; its warning counters tell.
        """
        self._batch.step(nstep=self.substeps)
        if not self._divergence.any():
            return None
        diverged: Mask = np.logical_or.reduce(self._divergence, axis=1)
        self._warnings[:] = 0
        return diverged

    def place(self, ids: Ids, motion: ArrayLike) -> None:
        """Puts simulations into a state as if newly made: time 0, no controls, no warm start.

        `motion` is (len(ids), nq + nv), or (nq + nv,) for all of them.
        """
        self.state[ids] = self._pristine
        self.motion[ids] = motion

    def sensors(self, names: Sequence[str]) -> Array:
        """(N, dims of all): a live float32 view of sensors that follow each other in the model.

        They read as before the last physics step, so they are one substep old.
        """
        first, last = self.model.sensor(names[0]), self.model.sensor(names[-1])
        readings: Array = self._batch.bind("sensordata", np.float32)[:, first.adr[0] : last.adr[0] + last.dim[0]]
        return readings

    def derived(self, field: str) -> Rows:
        """(N, ...): a live view of what MuJoCo derives (`xpos`, `cvel`, ...), as before the last physics step."""
        values: Rows = self._batch.bind(field)
        return values

    def per_simulation(self, field: str) -> Rows:
        """(N, ...): values of a model field for each simulation, live and part of the state from now on."""
        values: Rows = self._batch.expand(field)
        self.mutable[f"physics/{field}"] = values
        return values

    def derive_constants(self, ids: Ids) -> None:
        """Recomputes what MuJoCo derives from masses (`mj_setConst`), after changing those of these simulations."""
        self._batch.set_const(ids)


def rotation_matrix(quat: Array) -> Array:
    """Body to world (3, 3, n) of unit quaternions (4, n) as w, x, y, z."""
    products = (quat[:, None] * quat).reshape(16, -1)
    entries: Array = _ROTATION_OF_PRODUCTS @ products
    return entries.reshape(3, 3, -1)


def lever_matrix(point_b: tuple[float, float, float]) -> Array:
    """(3, 3): turns an angular velocity w into the velocity w x p of a point p [m]."""
    x, y, z = point_b
    return np.array([[0, z, -y], [-z, 0, x], [y, -x, 0]], np.float32)


def point_velocity_b(rotation: Array, velocity_w: Array, angular_velocity_b: Array, lever: Array) -> Array:
    """Velocity of a point of a floating base in the base frame (3, n) [m/s]: R'v + w x p.

    A free joint holds the linear velocity (3, n) of the base's origin in the world frame and the angular velocity
    (3, n) in the base frame (MuJoCo documentation, "Floating objects"); `lever` is the `lever_matrix` of p.
    """
    velocity: Array = np.add.reduce(velocity_w[:, None] * rotation, axis=0)
    velocity += lever @ angular_velocity_b
    return velocity


def allowed_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # not on every system
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _silence_mujoco() -> None:
    """Diverged simulations are counted (`Simulations.step`); MuJoCo would also write a file into the user's folder."""
    log = mujoco.MjLogConfig.get()
    log.logto_file = False
    log.logto_console = False
    mujoco.MjLogConfig.set(log)
