"""A trained policy that moves a simulated robot, to be looked at."""

from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch

from unilab_fabric.arguments import argument_types
from unilab_fabric.checkpoints import read_manifest, saved_config, verify
from unilab_fabric.config import resolve_run
from unilab_fabric.envs.registry import make_task, task_class
from unilab_fabric.envs.vector_env import TaskEnv
from unilab_fabric.errors import UserError
from unilab_fabric.policies import trained_learner

_COMMAND_RGBA = (0.1, 0.7, 0.2, 1.0)
_VELOCITY_RGBA = (0.15, 0.35, 0.95, 1.0)
_ARROW_ABOVE = 0.35  # m over the robot's root
_ARROW_RADIUS = 0.015  # m


class Playing:
    """One environment under the deterministic policy of a checkpoint."""

    def __init__(self, ckpt_path: Path, *, physics: str, seed: int, episode_s: float) -> None:
        """Raises UserError for a checkpoint that cannot be read, and a task that is not simulated by MuJoCo."""
        manifest = read_manifest(ckpt_path)
        verify(ckpt_path)
        config = resolve_run(saved_config(ckpt_path))
        wanted = {"num_envs": 1, "physics": physics, "stagger": False, "episode_s": episode_s}
        known = argument_types(task_class(config.task.class_path))
        changed = {name: value for name, value in wanted.items() if name in known}
        self.task = make_task(config.task.class_path, config.task.init_args | changed, seed=seed, num_threads=1)
        self.simulation = simulation_of(self.task)
        self.policy = trained_learner(ckpt_path, config, self.task.task_spec()).policy().eval()
        self.title = f"{config.learner.class_path} on {config.task.class_path}, {manifest['env_steps']:,} steps"
        self.data = mujoco.MjData(self.simulation.model)
        self.task.reset(seed=seed)

    @property
    def control_step_s(self) -> float:
        """Length of a control step [s]."""
        step: float = self.simulation.model.opt.timestep * self.simulation.substeps
        return step

    @torch.no_grad()
    def step(self) -> None:
        """One control step; `data` then shows where the robot is."""
        observation = torch.from_numpy(self.task.observation["actor"].copy())
        self.task.advance(self.policy(observation).numpy().copy())
        self.show()

    def show(self) -> None:
        """Brings `data` to the environment's state."""
        self.data.qpos[:], self.data.qvel[:] = self.simulation.qpos[0], self.simulation.qvel[0]
        mujoco.mj_forward(self.simulation.model, self.data)


def simulation_of(task: TaskEnv) -> Any:
    """The task's simulations. Raises UserError where it has none of ours."""
    if not hasattr(task, "sims"):
        raise UserError("task", task.name, "it is not one of our own simulations; allowed: a task with MuJoCo physics")
    return task.sims


def draw_motion(scene: mujoco.MjvScene, playing: Playing) -> None:
    """Arrows over the robot: the commanded planar velocity in green, its own in blue; a metre for 1 m/s."""
    motion = playing.task.planar_motion()
    if motion is None:
        return
    root = playing.data.qpos
    turn = np.arctan2(2 * (root[3] * root[6] + root[4] * root[5]), 1 - 2 * (root[5] ** 2 + root[6] ** 2))
    ahead, left = np.array([np.cos(turn), np.sin(turn), 0]), np.array([-np.sin(turn), np.cos(turn), 0])
    for level, (planar, rgba) in enumerate(zip(motion, (_COMMAND_RGBA, _VELOCITY_RGBA), strict=True)):
        start = root[:3] + np.array([0, 0, _ARROW_ABOVE + 0.05 * level])
        if np.hypot(*planar) < 0.02 or scene.ngeom >= scene.maxgeom:
            continue
        geom = scene.geoms[scene.ngeom]
        arrow = mujoco.mjtGeom.mjGEOM_ARROW
        mujoco.mjv_initGeom(geom, arrow, np.zeros(3), np.zeros(3), np.zeros(9), np.array(rgba, np.float32))
        mujoco.mjv_connector(geom, arrow, _ARROW_RADIUS, start, start + planar[0] * ahead + planar[1] * left)
        scene.ngeom += 1


def follow(camera: mujoco.MjvCamera, model: mujoco.MjModel) -> None:
    """Makes a camera follow the robot; one with a fixed base is seen from its side, whole."""
    if model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE:
        camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        camera.trackbodyid = int(model.jnt_bodyid[0])
        camera.distance = 3.5 * max(0.6, float(model.key_qpos[0, 2]) if model.nkey else 0.6)
        camera.azimuth, camera.elevation = 130, -18
    else:
        camera.lookat[:] = model.stat.center
        camera.distance, camera.azimuth, camera.elevation = 1.2 * model.stat.extent, 90, -10
