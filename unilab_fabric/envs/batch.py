"""mjbatch behind names: state rows, joints, a floating base, sensors, warning counters.

Everything here is numpy over `mjbatch.Batch`; nothing asks MuJoCo for an extra forward pass.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mjbatch
import mujoco
import numpy as np
from numpy.typing import ArrayLike, NDArray

from unilab_fabric.envs.vector_env import Array, Ids, Mask
from unilab_fabric.errors import UserError

Rows = NDArray[np.float64]

_DIVERGENCE = slice(mujoco.mjtWarning.mjWARN_BADQPOS, mujoco.mjtWarning.mjWARN_BADCTRL + 1)


class Simulations:
    """N simulations of one model, stepped together on a pool of threads.

    `state`, `qpos`, `qvel` and `ctrl` are views of the simulations' own state: what is written counts at the next step.
    """

    state: Rows
    """(N, nstate): whole integration states, warm start included."""
    qpos: Rows
    """(N, nq)"""
    qvel: Rows
    """(N, nv)"""
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
        self._substeps = substeps
        self._batch = mjbatch.Batch(model, num_envs, num_threads=num_threads or allowed_cores())
        self._batch.reset()
        self.state = self._batch.bind("state")
        self.qpos = self._batch.bind("qpos")
        self.qvel = self._batch.bind("qvel")
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
        self._batch.step(nstep=self._substeps)
        if not self._divergence.any():
            return None
        diverged: Mask = np.logical_or.reduce(self._divergence, axis=1)
        self._warnings[:] = 0
        return diverged

    def place(self, ids: Ids, qpos: ArrayLike, qvel: ArrayLike) -> None:
        """Puts simulations into a state as if newly made: time 0, no controls, no warm start.

        qpos (len(ids), nq) or (nq,), qvel likewise.
        """
        self.state[ids] = self._pristine
        self.qpos[ids] = qpos
        self.qvel[ids] = qvel

    def sensors(self, names: Sequence[str]) -> Array:
        """(N, dims of all): a live float32 view of sensors that follow each other in the model.

        They read as before the last physics step, so they are one substep old.
        """
        first, last = self.model.sensor(names[0]), self.model.sensor(names[-1])
        readings: Array = self._batch.bind("sensordata", np.float32)[:, first.adr[0] : last.adr[0] + last.dim[0]]
        return readings

    def per_simulation(self, field: str) -> Rows:
        """(N, ...): values of a model field for each simulation, live and part of the state from now on."""
        values: Rows = self._batch.expand(field)
        self.mutable[f"physics/{field}"] = values
        return values

    def derive_constants(self, ids: Ids) -> None:
        """Recomputes what MuJoCo derives from masses (`mj_setConst`), after changing those of these simulations."""
        self._batch.set_const(ids)


@dataclass(frozen=True, kw_only=True)
class Base:
    """A floating base as its joint's coordinates give it, current with the state; n environments, float32."""

    height: Array
    """(n,): z of the base frame [m]."""
    gravity_b: Array
    """(3, n): unit vector of gravity in the base frame, R'(0, 0, -1); the heading does not change it."""
    velocity_b: Array
    """(3, n): linear velocity of a point of the base, in the base frame [m/s]."""
    angular_velocity_b: Array
    """(3, n): in the base frame [rad/s]."""


def read_base(qpos: NDArray[np.floating[Any]], qvel: NDArray[np.floating[Any]], point_b: tuple[float, ...]) -> Base:
    """The base of models whose first joint is free; qpos (nq, n), qvel (nv, n), the point in the base frame [m].

    A free joint holds the linear velocity of the base's origin in the world frame and the angular velocity in the base
    frame (MuJoCo documentation, "Floating objects"), so v_b = R'v + w x r.
    """
    rotation = rotation_matrix(qpos[3:7])
    x, y, z = point_b
    spin = qvel[3:6]
    velocity = np.einsum("in,ijn->jn", qvel[:3], rotation)
    velocity[0] += spin[1] * z - spin[2] * y
    velocity[1] += spin[2] * x - spin[0] * z
    velocity[2] += spin[0] * y - spin[1] * x
    return Base(height=qpos[2], gravity_b=-rotation[2], velocity_b=velocity, angular_velocity_b=spin)


def rotation_matrix(quat: NDArray[np.floating[Any]]) -> NDArray[np.floating[Any]]:
    """Body to world (3, 3, n) of unit quaternions (4, n) as w, x, y, z."""
    outer = 2 * quat[:, None] * quat[None]
    w, x, y, z = range(4)
    rotation = np.empty((3, 3, quat.shape[1]), quat.dtype)
    rotation[0, 0] = 1 - outer[y, y] - outer[z, z]
    rotation[1, 1] = 1 - outer[x, x] - outer[z, z]
    rotation[2, 2] = 1 - outer[x, x] - outer[y, y]
    rotation[0, 1], rotation[1, 0] = outer[x, y] - outer[w, z], outer[x, y] + outer[w, z]
    rotation[0, 2], rotation[2, 0] = outer[x, z] + outer[w, y], outer[x, z] - outer[w, y]
    rotation[1, 2], rotation[2, 1] = outer[y, z] - outer[w, x], outer[y, z] + outer[w, x]
    return rotation


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
