"""A policy in the browser: a page with the robot, made of its MJCF's primitives, that moves as the simulation does."""

import math
import threading
import time
from typing import Any

import mujoco
import numpy as np

from unilab_fabric.errors import UserError
from unilab_fabric.play.playing import Playing

_REFRESH_S = 1 / 30
_FLOOR_M, _CELL_M = 20.0, 0.5


class WebView:
    """The page at http://host:port; whoever opens it sees the robot at once."""

    def __init__(self, playing: Playing, *, host: str, port: int) -> None:
        """Starts to serve. Raises UserError where the packages are missing or the port is taken."""
        try:
            import trimesh
            import viser
        except ImportError:
            raise UserError(
                "viewer", "web", "viser is not installed; allowed: pip install 'unilab-fabric[viewer]'"
            ) from None
        self._playing = playing
        self._trimesh: Any = trimesh
        try:
            self._server = viser.ViserServer(host=host, port=port, verbose=False)
        except OSError as error:
            raise UserError("port", port, f"nothing can be served there: {error.strerror or error}") from None
        if port not in (0, self._server.get_port()):
            self._server.stop()
            raise UserError("port", port, "it is taken; allowed: a free one, or 0, which takes one that is free")
        self.url = f"http://{host}:{self._server.get_port()}"
        self._floor = self._server.scene.add_grid("/floor", width=_FLOOR_M, height=_FLOOR_M, cell_size=_CELL_M)
        self._geoms = {geom: self._add(geom) for geom in _visible(playing.simulation.model)}
        self._floats = playing.simulation.model.jnt_type[0] == mujoco.mjtJoint.mjJNT_FREE
        self._text = self._server.gui.add_markdown(playing.title)
        self._server.initial_camera.position = (1.1, -1.1, 0.7)
        self._server.initial_camera.look_at = (0.0, 0.0, 0.3)
        self._shown_at = 0.0
        self._closed = threading.Event()

    def run(self, seconds: float | None = None) -> None:
        """Plays in real time: for `seconds` [s], or until `close` or an interrupt."""
        playing, until = self._playing, math.inf if seconds is None else time.monotonic() + seconds
        playing.show()
        self.update()
        while time.monotonic() < until and not self._closed.is_set():
            began = time.monotonic()
            playing.step()
            if began - self._shown_at >= _REFRESH_S:
                self._shown_at = began
                self.update()
            time.sleep(max(0.0, playing.control_step_s - (time.monotonic() - began)))

    def update(self) -> None:
        """Brings the page to where the robot is; the robot stays in its middle, and the floor moves."""
        data = self._playing.data
        place = np.array([*data.qpos[:2], 0.0]) if self._floats else np.zeros(3)
        self._floor.position = -np.mod(place, _CELL_M)
        quat = np.zeros(4)
        for geom, handle in self._geoms.items():
            mujoco.mju_mat2Quat(quat, data.geom_xmat[geom])
            handle.position, handle.wxyz = data.geom_xpos[geom] - place, quat.copy()
        motion = self._playing.task.planar_motion()
        if motion is not None:
            (ahead, left), (own_ahead, own_left) = motion
            told = f"command {ahead:+.2f} {left:+.2f} m/s, velocity {own_ahead:+.2f} {own_left:+.2f} m/s"
            self._text.content = f"{self._playing.title}\n\n{told}"

    def close(self) -> None:
        """Ends `run` and stops serving."""
        self._closed.set()
        self._server.stop()

    def _add(self, geom: int) -> Any:
        model = self._playing.simulation.model
        mesh = self._mesh(model.geom_type[geom], model.geom_size[geom])
        red, green, blue = (int(255 * part) for part in model.geom_rgba[geom, :3])
        name = model.geom(geom).name or str(geom)
        return self._server.scene.add_mesh_simple(f"/robot/{name}", mesh.vertices, mesh.faces, color=(red, green, blue))

    def _mesh(self, kind: int, size: Any) -> Any:
        create = self._trimesh.creation
        if kind == mujoco.mjtGeom.mjGEOM_SPHERE:
            return create.icosphere(subdivisions=2, radius=size[0])
        if kind == mujoco.mjtGeom.mjGEOM_BOX:
            return create.box(extents=2 * size)
        if kind == mujoco.mjtGeom.mjGEOM_CYLINDER:
            return create.cylinder(radius=size[0], height=2 * size[1], sections=24)
        capsule = create.capsule(radius=size[0], height=2 * size[1], count=(16, 16))
        capsule.apply_translation(-capsule.bounds.mean(axis=0))  # its middle is its place, as in MuJoCo
        return capsule


def _visible(model: mujoco.MjModel) -> list[int]:
    """The robot's primitives."""
    kinds = (mujoco.mjtGeom.mjGEOM_SPHERE, mujoco.mjtGeom.mjGEOM_CAPSULE, mujoco.mjtGeom.mjGEOM_CYLINDER)
    drawn = [int(kind) for kind in (*kinds, mujoco.mjtGeom.mjGEOM_BOX)]
    return [geom for geom in range(model.ngeom) if model.geom_bodyid[geom] > 0 and model.geom_type[geom] in drawn]
