"""A trained policy to look at: a film or a picture without a display, or MuJoCo's own viewer where there is one."""

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mujoco
import numpy as np
import torch
from numpy.typing import NDArray

from unilab_fabric.arguments import argument_types
from unilab_fabric.checkpoints import read_manifest, saved_config, verify
from unilab_fabric.config import resolve_run
from unilab_fabric.envs.registry import make_task, task_class
from unilab_fabric.envs.vector_env import TaskEnv
from unilab_fabric.errors import UserError
from unilab_fabric.policies import trained_learner

Image = NDArray[np.uint8]

FILMS, PICTURES = (".mp4", ".gif"), (".png",)
FRAMES_PER_S = 25
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


def record(playing: Playing, output: Path, *, seconds: float, width: int, height: int) -> int:
    """Writes a film of `seconds` [s], or a picture of its end; returns the number of frames.

    Raises UserError where nothing can be drawn here, or a package is missing.
    """
    if find_spec("imageio") is None:
        raise UserError("output", output, "imageio is not installed; allowed: pip install 'unilab-fabric[video]'")
    import imageio.v3 as imageio

    frames = render(playing, seconds=seconds, width=width, height=height)
    if output.suffix in PICTURES:
        *_, last = frames
        imageio.imwrite(output, last)
        return 1
    images = list(frames)
    if output.suffix == ".gif":
        imageio.imwrite(output, images, duration=1000 / FRAMES_PER_S, loop=0)
    else:
        imageio.imwrite(output, images, fps=FRAMES_PER_S, codec="libx264", macro_block_size=1)
    return len(images)


def render(playing: Playing, *, seconds: float, width: int, height: int) -> Iterator[Image]:
    """Frames (height, width, 3), `FRAMES_PER_S` for each second, the camera following the robot."""
    model = playing.simulation.model
    model.vis.global_.offwidth, model.vis.global_.offheight = width, height
    try:
        renderer = mujoco.Renderer(model, height, width)
    except Exception as error:  # MuJoCo's backends raise what their libraries do
        reason = (str(error) or repr(error)).splitlines()[0]
        allowed = f"nothing can be drawn ({reason}); allowed: egl or osmesa, with that library installed"
        raise UserError("MUJOCO_GL", os.environ.get("MUJOCO_GL", "not set"), allowed) from None
    camera = _following(model)
    try:
        playing.show()
        for frame in range(round(seconds * FRAMES_PER_S)):
            while playing.task.episode_length[0] * playing.control_step_s < frame / FRAMES_PER_S:
                playing.step()
                if playing.task.episode_length[0] == 0:
                    break  # a new episode has begun: go on from there
            renderer.update_scene(playing.data, camera)
            _draw_motion(renderer.scene, playing)
            yield _captioned(renderer.render(), playing)
    finally:
        renderer.close()


def show_in_viewer(playing: Playing) -> None:
    """Runs in MuJoCo's own window until it is closed. Raises UserError where there is no display."""
    if os.name == "posix" and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        raise UserError("viewer", True, "there is no display here; allowed: --output FILE, a film without one")
    import mujoco.viewer

    with mujoco.viewer.launch_passive(playing.simulation.model, playing.data) as viewer:
        while viewer.is_running():
            began = time.perf_counter()
            playing.step()
            viewer.sync()
            time.sleep(max(0.0, playing.control_step_s - (time.perf_counter() - began)))


def _following(model: mujoco.MjModel) -> mujoco.MjvCamera:
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    if model.njnt and model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE:
        camera.type = mujoco.mjtCamera.mjCAMERA_TRACKING
        camera.trackbodyid = int(model.jnt_bodyid[0])
        camera.distance = 3.5 * max(0.6, float(model.key_qpos[0, 2]) if model.nkey else 0.6)
        camera.azimuth, camera.elevation = 130, -18
    return camera


def _draw_motion(scene: mujoco.MjvScene, playing: Playing) -> None:
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


def _captioned(frame: Image, playing: Playing) -> Image:
    from PIL import Image as Picture
    from PIL import ImageDraw

    picture = Picture.fromarray(frame)
    lines = [playing.title, f"{playing.task.episode_length[0] * playing.control_step_s:5.2f} s"]
    motion = playing.task.planar_motion()
    if motion is not None:
        command, velocity = motion
        lines.append(f"command  {command[0]:+.2f} {command[1]:+.2f} m/s (green)")
        lines.append(f"velocity {velocity[0]:+.2f} {velocity[1]:+.2f} m/s (blue)")
    drawing, black = ImageDraw.Draw(picture), (0, 0, 0)
    drawing.multiline_text((8, 6), "\n".join(lines), fill=(255, 255, 255), stroke_width=1, stroke_fill=black)
    return np.asarray(picture)
