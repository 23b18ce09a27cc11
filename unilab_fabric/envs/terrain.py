"""Rough ground: a MuJoCo height field of tiles, where each environment stands on it, and how hard its tile is.

Level 0 is the easiest and lies at the field's low x; every level has one tile of each kind, side by side along y. A
tile is flat in the middle, where robots start, and at height 0 around its edge. Heights depend on the terrain's own
seed alone, so every rank and every resumed run builds the same field.

MuJoCo splits each cell of the grid into two triangles; all heights here are those of the triangles.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import mujoco
import numpy as np
from numpy.typing import NDArray

from unilab_fabric.envs.commands import Range, check_range
from unilab_fabric.envs.robots.model import FLOOR
from unilab_fabric.envs.vector_env import Array, Floats, Ids, Mask
from unilab_fabric.errors import UserError, nearest
from unilab_fabric.spaces import Mirror

Kind = Literal["rough", "slope_up", "slope_down", "stairs_up", "stairs_down", "waves"]
KINDS: tuple[Kind, ...] = ("rough", "slope_up", "slope_down", "stairs_up", "stairs_down", "waves")

LEVEL_TAG = "Curriculum/terrain_level"
"""Metric: the mean level of all environments, counted whenever an episode ends."""

START_REACH = 0.5  # m; tasks start their robots this far from a platform's middle at most, along x and along y
_LEAST_PLATFORM = 2 * (START_REACH + 0.3)  # m; room for the feet around the base
_EDGE = 0.5  # m; a robot this near to the end of the field has left it
_BASE = 1.0  # m of solid ground under the lowest point
_LEAST_SPAN = 1e-3  # m; MuJoCo takes no field without height
_BUMP = 0.2  # m, side of the squares of rough ground
_CRESTS = 2  # waves between platform and edge


@dataclass(frozen=True, kw_only=True)
class Terrain:
    """A field of tiles with rising difficulty, the curriculum on it and the critic's height samples."""

    kinds: tuple[Kind, ...] = KINDS
    """What lies side by side, by what a robot meets that walks off the platform; a kind may stand there twice."""
    levels: int = 10
    """Tiles of each kind, from the easiest to the hardest."""
    tile_m: float = 8.0
    """Side of a tile [m], a whole number of resolution_m."""
    platform_m: float = 2.0
    """Side of the flat square in a tile's middle [m]."""
    resolution_m: float = 0.1
    """Distance of the field's grid points [m]; a stair rises over one of it."""
    border_m: float = 5.0
    """Flat ground around all tiles [m]."""
    roughness: Range = (0.01, 0.05)
    """Greatest height and depth of rough ground [m], at the lowest and at the highest level."""
    slope: Range = (0.05, 0.4)
    """Rise over run of slopes."""
    stair_height: Range = (0.02, 0.16)
    """Height of a step [m]."""
    tread_m: float = 0.4
    """Length of a step [m]."""
    wave_height: Range = (0.02, 0.25)
    """Height of waves [m]."""
    curriculum: bool = True
    """Move environments up and down by how far they walk; false draws levels at reset and keeps them."""
    start_levels: int = 3
    """With the curriculum, environments start on one of this many lowest levels (all, where there are fewer)."""
    sample_length_m: float = 1.6
    """Length of the grid of height samples along the heading [m], the base in its middle."""
    sample_width_m: float = 1.0
    """Width of that grid [m]."""
    sample_spacing_m: float = 0.2
    """Distance of two samples [m]."""
    seed: int = 0
    """Seed of the field, the same for every rank."""

    def __post_init__(self) -> None:
        if not self.kinds:
            raise UserError("task.terrain.kinds", list(self.kinds), f"allowed: one or more of {', '.join(KINDS)}")
        for kind in self.kinds:
            if kind not in KINDS:
                raise UserError("task.terrain.kinds", list(self.kinds), nearest(kind, KINDS))
        for name in ("roughness", "slope", "stair_height", "wave_height"):
            check_range(f"task.terrain.{name}", getattr(self, name))
            if getattr(self, name)[0] < 0:
                raise UserError(f"task.terrain.{name}", list(getattr(self, name)), "allowed: 0 or more")
        for name in ("levels", "start_levels"):
            if not 1 <= getattr(self, name) <= 100:
                raise UserError(f"task.terrain.{name}", getattr(self, name), "allowed: 1 to 100")
        limits = {
            "resolution_m": (0.02, 0.5),
            "platform_m": (_LEAST_PLATFORM, 20.0),
            "tile_m": (self.platform_m + 2 * self.resolution_m, 40.0),
            "border_m": (2 * _EDGE, 100.0),
            "tread_m": (self.resolution_m, 10.0),
            "sample_length_m": (0.0, 10.0),
            "sample_width_m": (0.0, 10.0),
            "sample_spacing_m": (0.02, 10.0),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise UserError(f"task.terrain.{name}", getattr(self, name), f"allowed: {low:g} to {high:g} m")
        cells = self.tile_m / self.resolution_m
        if abs(cells - round(cells)) > 1e-6:
            raise UserError(
                "task.terrain.tile_m", self.tile_m, f"allowed: a whole number of resolution_m = {self.resolution_m:g} m"
            )
        if self.seed < 0:
            raise UserError("task.terrain.seed", self.seed, "allowed: 0 or more")

    @property
    def sample_points(self) -> Array:
        """(2, samples): x forward and y to the left of the base [m]; rear to front, right to left within each."""
        x = _centred(self.sample_length_m, self.sample_spacing_m)
        y = _centred(self.sample_width_m, self.sample_spacing_m)
        return np.stack([x.repeat(y.size), np.tile(y, x.size)]).astype(np.float32)

    @property
    def num_samples(self) -> int:
        """Height samples of one environment."""
        return int(self.sample_points.shape[1])


def mirrored(critic: Mirror, terrain: Terrain) -> Mirror:
    """The mirror of a critic's observation with this terrain's samples behind it: left and right change places."""
    width = _centred(terrain.sample_width_m, terrain.sample_spacing_m).size
    start, samples = len(critic.index), terrain.num_samples
    flipped = start + np.arange(samples).reshape(-1, width)[:, ::-1].ravel()
    return Mirror(index=(*critic.index, *flipped.tolist()), sign=(*critic.sign, *[1.0] * samples))


class HeightField:
    """The heights of a terrain, in MuJoCo's form and for lookup."""

    data: Array
    """(rows along y, columns along x): what MuJoCo's model holds, in [0, 1]."""
    low: float
    """Height of the lowest point [m]."""
    span: float
    """Height of the highest point above it [m]."""
    centres: NDArray[np.float64]
    """(levels, kinds, 3): middles of the platforms [m], world frame."""

    def __init__(self, terrain: Terrain) -> None:
        """Builds the field, its middle at the world's origin."""
        step, levels, kinds = terrain.resolution_m, terrain.levels, len(terrain.kinds)
        cells, border = round(terrain.tile_m / step), math.ceil(terrain.border_m / step - 1e-6)
        heights = np.zeros((kinds * cells + 2 * border + 1, levels * cells + 2 * border + 1))
        self.centres = np.zeros((levels, kinds, 3))
        for level in range(levels):
            for column in range(kinds):
                y, x = border + column * cells, border + level * cells
                tile = _tile(terrain, level, column)
                heights[y : y + cells + 1, x : x + cells + 1] = tile
                self.centres[level, column] = (
                    (level - (levels - 1) / 2) * terrain.tile_m,
                    (column - (kinds - 1) / 2) * terrain.tile_m,
                    tile[cells // 2, cells // 2],
                )
        self.low = float(heights.min())
        self.span = max(float(heights.max()) - self.low, _LEAST_SPAN)
        self.data = ((heights - self.low) / self.span).astype(np.float32)
        rows, self._columns = self.data.shape
        self._step = step
        self._half = np.array([(self._columns - 1) * step / 2, (rows - 1) * step / 2])  # along x and y [m]
        self._cells = np.array([self._columns - 1, rows - 1], np.float32)  # along x and y
        self._heights = (self.low + self.span * self.data.astype(np.float64)).astype(np.float32).ravel()

    def compile(self, spec: mujoco.MjSpec) -> mujoco.MjModel:
        """The model of a spec with this field in place of its floor, which keeps its contact settings.

        Raises ValueError for a spec without a geom of the name `FLOOR`, or one that does not compile.
        """
        floor = spec.geom(FLOOR)
        if floor is None:
            raise ValueError(f"there is no geom {FLOOR} to put the terrain in the place of")
        rows, columns = self.data.shape
        size = [*self._half, self.span, _BASE]
        spec.add_hfield(name="terrain", nrow=rows, ncol=columns, size=size, userdata=self.data.ravel())
        floor.type = mujoco.mjtGeom.mjGEOM_HFIELD
        floor.hfieldname = "terrain"
        floor.pos, floor.quat = [0, 0, self.low], [1, 0, 0, 0]
        model = spec.compile()
        model.hfield_data[:] = self.data.ravel()  # as it is, whatever the compiler makes of order and range
        return model

    def height(self, x: Array, y: Array) -> Array:
        """Height of the ground [m] at places [m] in the world, all of one shape; outside it goes on as at the edge."""
        first, along, across, fractions = self._triangle(x, y)
        height: Array = first + fractions.max(axis=0) * along + fractions.min(axis=0) * across
        return height

    def clearance(self, x: Array, y: Array, z: Array) -> Array:
        """Distance of points [m] from the plane of the triangle beneath them [m], all of one shape.

        A sphere with its centre there touches where this is its radius; near an edge of a triangle it may touch
        before.
        """
        first, along, across, fractions = self._triangle(x, y)
        above = z - (first + fractions.max(axis=0) * along + fractions.min(axis=0) * across)
        distance: Array = above / np.sqrt(1 + (along * along + across * across) / np.float32(self._step**2))
        return distance

    def outside(self, x: Array, y: Array) -> Mask:
        """Whether a place [m] is beyond the field, or within half a metre of its end."""
        gone: Mask = (np.abs(x) > self._half[0] - _EDGE) | (np.abs(y) > self._half[1] - _EDGE)
        return gone

    def _triangle(self, x: Array, y: Array) -> tuple[Array, Array, Array, Array]:
        """The triangle under each place, as its three corners on the way from (0, 0) to (1, 1) of the cell.

        Returns the first corner's height, the rises from it to the second and on to the third [m], and the place in
        the cell (2, ...) along x and y: of the two, the greater counts for the first rise, the lesser for the second.
        """
        shape = (2,) + (1,) * x.ndim
        place = np.stack([x, y])
        place += self._half.reshape(shape).astype(np.float32)
        place *= np.float32(1 / self._step)
        cells = self._cells.reshape(shape)
        np.fmax(np.fmin(place, cells), 0, out=place)  # of a place that is not finite too
        cell = np.minimum(place, cells - 1).astype(np.int32)
        place -= cell
        corner = cell[1] * self._columns + cell[0]
        first = self._heights.take(corner)
        second = self._heights.take(corner + np.where(place[1] > place[0], self._columns, 1))
        third = self._heights.take(corner + (self._columns + 1))
        return first, second - first, third - second, place


class Ground:
    """The field under N environments: each keeps to its kind of tile and moves between levels."""

    field: HeightField
    level: NDArray[np.int64]
    """(N,): of the running episode."""
    walked: Array
    """(N,): way along the command since the episode began [m]."""

    def __init__(self, terrain: Terrain, num_envs: int) -> None:
        """Builds the field; environment i stands on tiles of kind i modulo their number."""
        self.field = HeightField(terrain)
        self._terrain = terrain
        self._points = terrain.sample_points
        self._column = np.arange(num_envs) % len(terrain.kinds)
        self.level = np.zeros(num_envs, np.int64)
        self.walked = np.zeros(num_envs, np.float32)
        self.mutable: dict[str, NDArray[Any]] = {"terrain/level": self.level, "terrain/walked": self.walked}
        """What `TaskEnv.mutable` needs to go on from a saved state."""

    def restart(self, rng: np.random.Generator) -> None:
        """Draws a level for every environment."""
        levels = self._terrain.levels
        self.level[:] = rng.integers(
            min(self._terrain.start_levels, levels) if self._terrain.curriculum else levels, size=self.level.size
        )

    def begin(self, ids: Ids) -> NDArray[np.float64]:
        """Begins episodes: where these environments' platforms have their middles (n, 3) [m]."""
        self.walked[ids] = 0
        centres: NDArray[np.float64] = self.field.centres[self.level[ids], self._column[ids]]
        return centres

    def sense(self, position: Array, rotation: Array, samples: Array) -> Array:
        """Writes the samples (samples, n) of n robots: height of the ground minus that of the base [m].

        Args:
            position: (3, n), of the bases in the world [m].
            rotation: (3, 3, n), base to world; the grid of samples turns with its heading.
            samples: Where to write.

        Returns the bases' heights above the ground beneath them (n,) [m].
        """
        heading = rotation[:2, 0] / np.maximum(np.hypot(rotation[0, 0], rotation[1, 0]), np.float32(1e-6))
        forward, left = self._points[:, :, None]
        x = position[0] + heading[0] * forward - heading[1] * left
        y = position[1] + heading[1] * forward + heading[0] * left
        np.subtract(self.field.height(x, y), position[2], out=samples)
        above: Array = position[2] - self.field.height(position[0], position[1])
        return above

    def count(self, velocity: Array, command: Array, step_s: float) -> None:
        """Adds a control step [s] to the way along the command: both (2, N) [m/s], forward and left."""
        speed = np.maximum(np.hypot(command[0], command[1]), np.float32(1e-6))
        self.walked += np.float32(step_s) * (velocity * command).sum(axis=0) / speed

    def move(self, rng: np.random.Generator, ids: Ids, place: Floats, commanded_m: Floats, failed: Mask) -> None:
        """Moves environments whose episodes have ended to the level of their next one.

        Up goes who has not failed and is more than half a tile away from the tile's middle; down goes who has walked
        less than half of the commanded way. Above the highest level any level follows.

        Args:
            rng: Generator of those levels.
            ids: (n,), of the environments.
            place: (2, n), where their episodes ended [m].
            commanded_m: (n,), commanded speed times the episode's time limit [m].
            failed: (n,), whether the episode was terminated.
        """
        if not self._terrain.curriculum:
            return
        level = self.level[ids]
        away = place - self.field.centres[level, self._column[ids], :2].T
        up = (np.hypot(away[0], away[1]) > self._terrain.tile_m / 2) & ~failed
        down = (self.walked[ids] < commanded_m / 2) & ~up
        level = np.maximum(level + up - down, 0)
        beyond = level >= self._terrain.levels
        level[beyond] = rng.integers(self._terrain.levels, size=int(beyond.sum()))
        self.level[ids] = level


def _centred(length: float, spacing: float) -> Floats:
    """As many points with this spacing as fit into the length, 0 in their middle."""
    count = math.floor(length / spacing + 1e-6) + 1
    return (np.arange(count) - (count - 1) / 2) * spacing


def _tile(terrain: Terrain, level: int, column: int) -> Floats:
    """Heights of a tile's grid points (cells + 1, cells + 1) along y and x [m], 0 at its edge."""
    kind = terrain.kinds[column]
    cells = round(terrain.tile_m / terrain.resolution_m)
    line = np.abs(np.arange(cells + 1) - cells / 2) * terrain.resolution_m
    from_edge = terrain.tile_m / 2 - np.maximum(line[:, None], line)
    run = (terrain.tile_m - terrain.platform_m) / 2  # from the edge to the platform
    share = level / max(terrain.levels - 1, 1)

    def at_level(limits: Range) -> float:
        return limits[0] + share * (limits[1] - limits[0])

    if kind == "rough":
        rng = np.random.default_rng([terrain.seed, level, column])
        block = max(1, round(_BUMP / terrain.resolution_m))
        count = cells // block + 1
        bumps = rng.uniform(-1, 1, (count, count)).repeat(block, axis=0).repeat(block, axis=1)
        between = (from_edge > 1e-6) & (from_edge < run - 1e-6)
        return np.asarray(np.where(between, at_level(terrain.roughness) * bumps[: cells + 1, : cells + 1], 0.0))
    if kind == "waves":
        crest = np.sin(_CRESTS * np.pi * np.minimum(from_edge / run, 1.0)) ** 2
        return at_level(terrain.wave_height) * np.asarray(crest)
    if kind.startswith("slope"):
        hill = at_level(terrain.slope) * np.asarray(np.minimum(from_edge, run))
    else:
        steps = np.minimum(np.floor(from_edge / terrain.tread_m + 1e-6), math.floor(run / terrain.tread_m + 1e-6))
        hill = at_level(terrain.stair_height) * np.asarray(steps)
    return hill if kind.endswith("_down") else -hill
