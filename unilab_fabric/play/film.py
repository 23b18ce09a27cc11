"""A film or a picture of a policy; no display is needed."""

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import mujoco
import numpy as np
from numpy.typing import NDArray

from unilab_fabric.errors import UserError
from unilab_fabric.play.playing import Playing, draw_motion, follow

Image = NDArray[np.uint8]

FILMS, PICTURES = (".mp4", ".gif"), (".png",)
FRAMES_PER_S = 25


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
    camera = mujoco.MjvCamera()
    mujoco.mjv_defaultFreeCamera(model, camera)
    follow(camera, model)
    try:
        playing.show()
        for frame in range(round(seconds * FRAMES_PER_S)):
            while playing.task.episode_length[0] * playing.control_step_s < frame / FRAMES_PER_S:
                playing.step()
                if playing.task.episode_length[0] == 0:
                    break  # a new episode has begun: go on from there
            renderer.update_scene(playing.data, camera)
            draw_motion(renderer.scene, playing)
            yield _captioned(renderer.render(), playing)
    finally:
        renderer.close()


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
