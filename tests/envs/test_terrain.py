"""Terrain against MuJoCo's own rays and contacts, and the curriculum by hand."""

import dataclasses
import math

import mujoco
import numpy as np
import pytest

from unilab_fabric.envs.batch import rotation_matrix
from unilab_fabric.envs.robots import g1, go2
from unilab_fabric.envs.tasks.g1_walk import G1Randomization, G1WalkFlat, touching, touching_field
from unilab_fabric.envs.tasks.go2_joystick import Go2JoystickFlat, Go2Noise, Go2Pushes, Go2Randomization
from unilab_fabric.envs.terrain import KINDS, LEVEL_TAG, Ground, HeightField, Terrain, mirrored
from unilab_fabric.errors import UserError
from unilab_fabric.spaces import Mirror

TASKS = {"go2": Go2JoystickFlat, "g1": G1WalkFlat}
CRITIC = {"go2": 52, "g1": 101}
SMALL = Terrain(levels=3, tile_m=6.0, border_m=1.0)
"""18 by 36 metres of tiles: quick to cast rays at."""


def make(robot="go2", num_envs=12, terrain=SMALL, **settings):
    return TASKS[robot](num_envs, **{"terrain": terrain, "num_threads": 1, "seed": 4, **settings})


def still(task):
    return np.zeros(task.action_space.shape, np.float32)


class Rays:
    """The height of a field's ground by MuJoCo's rays, straight down from 20 m."""

    def __init__(self, field):
        spec = mujoco.MjSpec()
        spec.worldbody.add_geom(name="floor", type=mujoco.mjtGeom.mjGEOM_PLANE, size=[0, 0, 1])
        self.model = field.compile(spec)
        self.data = mujoco.MjData(self.model)
        mujoco.mj_forward(self.model, self.data)

    def distance(self, start, direction):
        geom = np.zeros(1, np.int32)
        return mujoco.mj_ray(self.model, self.data, np.array(start), np.array(direction), None, 1, -1, geom)

    def height(self, x, y):
        return 20 - self.distance([x, y, 20.0], [0.0, 0.0, -1.0])


def columns(*arrays):
    return [np.asarray(array, np.float32) for array in arrays]


def test_the_terrains_seed_alone_makes_the_field():
    assert HeightField(SMALL).data.tobytes() == HeightField(SMALL).data.tobytes()
    other = HeightField(dataclasses.replace(SMALL, seed=1))
    assert (other.data != HeightField(SMALL).data).any()
    fields = [make(seed=seed, num_envs=2).sims.model.hfield_data for seed in (0, 7)]
    np.testing.assert_array_equal(*fields)


def test_mujocos_data_fill_the_range_from_0_to_1():
    field = HeightField(SMALL)
    assert (field.data.min(), field.data.max()) == (0, 1)
    model = Rays(field).model
    assert model.hfield_size[0].tolist() == pytest.approx([10.0, 19.0, field.span, 1.0])
    assert model.geom("floor").pos[2] == pytest.approx(field.low)


def test_ground_without_any_height_is_a_field_too():
    flat = dict.fromkeys(("roughness", "slope", "stair_height", "wave_height"), (0.0, 0.0))
    field = HeightField(dataclasses.replace(SMALL, **flat))
    assert Rays(field).height(1.0, 1.0) == pytest.approx(0, abs=1e-6)
    assert field.height(*columns([1.0], [1.0])) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_heights_are_those_that_mujocos_rays_meet(kind):
    field = HeightField(dataclasses.replace(SMALL, kinds=(kind,)))
    rays, rng = Rays(field), np.random.default_rng(0)
    x, y = columns(rng.uniform(-9.9, 9.9, 400), rng.uniform(-3.9, 3.9, 400))
    met = [rays.height(*place) for place in zip(x.tolist(), y.tolist(), strict=True)]
    np.testing.assert_allclose(field.height(x, y), met, atol=2e-5)
    assert np.std(met) > 0.005


def test_beyond_the_field_the_ground_goes_on_as_at_its_edge_and_nothing_breaks():
    field = HeightField(SMALL)
    assert field.height(*columns([1e6, np.nan, 0], [0, 0, -np.inf])).tolist() == [0, 0, 0]


def test_clearance_is_the_distance_along_the_grounds_normal():
    field = HeightField(Terrain(kinds=("slope_down",), levels=1, slope=(0.4, 0.4)))
    normal = np.array([0.4, 0, 1]) / math.hypot(0.4, 1)  # on the side towards positive x
    points = np.array([[2.03, 0.52, 1.3], [2.57, -0.71, 1.1], [3.01, 0.0, 0.8]])
    expected = [Rays(field).distance(point, -normal) for point in points]
    np.testing.assert_allclose(field.clearance(*columns(*points.T)), expected, atol=1e-5)
    assert min(expected) > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_flat_in_the_middle_and_harder_with_the_level(kind):
    terrain = Terrain(kinds=(kind,), levels=4)
    field = HeightField(terrain)
    extent = []
    for x, y, z in field.centres[:, 0]:
        offsets = np.linspace(-0.99, 0.99, 12)
        platform = field.height(*columns(x + offsets, y + offsets[::-1]))
        np.testing.assert_allclose(platform, z, atol=1e-6)
        along = np.linspace(-3.99, 3.99, 400)
        heights = field.height(*columns(x + along, np.full(400, y)))
        assert abs(heights[[0, -1]]).max() < 0.06
        extent.append(np.ptp(heights))
        if kind.endswith("_up"):
            assert heights.min() == pytest.approx(z, abs=1e-5)
        if kind.endswith("_down"):
            assert heights.max() == pytest.approx(z, abs=1e-5)
    assert (np.diff(extent) > 0).all()


def test_stairs_have_the_height_and_tread_asked_for():
    field = HeightField(Terrain(kinds=("stairs_down",), levels=1, stair_height=(0.1, 0.1), tread_m=0.5))
    x = np.arange(1.25, 4.0, 0.5)  # the middles of the treads from the platform on
    np.testing.assert_allclose(field.height(*columns(x, np.zeros(6))), [0.5, 0.4, 0.3, 0.2, 0.1, 0.0], atol=1e-6)


@pytest.mark.parametrize("physics", ["fast", "faithful"])
@pytest.mark.parametrize("robot", ["go2", "g1"])
def test_robots_begin_on_their_tiles_with_their_feet_at_ground_level(robot, physics):
    task = make(robot, physics=physics, terrain=dataclasses.replace(SMALL, curriculum=False))
    task.reset(seed=1)
    model, field = task.sims.model, task._ground.field
    data, depth = mujoco.MjData(model), []
    for env in range(12):
        centre = field.centres[task._ground.level[env], env % 6]
        assert np.abs(task.sims.qpos[env, :2] - centre[:2]).max() <= 0.5
        mujoco.mj_setState(model, data, task.sims.state[env], mujoco.mjtState.mjSTATE_INTEGRATION)
        mujoco.mj_forward(model, data)
        names, radius = (go2.LEGS, go2.FOOT_RADIUS) if robot == "go2" else (g1.CORNERS, g1.CORNER_RADIUS)
        feet = [data.geom(name).xpos[2] - centre[2] for name in names]
        np.testing.assert_allclose(feet, radius, atol=1.5e-3)  # a G1's toes are 1 mm up
        floor = model.geom("floor").id
        assert all(floor in contact.geom for contact in data.contact)
        depth += [contact.dist for contact in data.contact]
    assert len(set(task._ground.level.tolist())) == 3
    assert min(depth, default=0) > -0.003
    for _ in range(25):
        task.advance(still(task))
    assert task.totals[:, 0].sum() == 0  # no episode has ended


def test_whatever_touches_the_floor_touches_the_terrain():
    """A robot on its back lies on the ground instead of falling through it."""
    for robot in TASKS:
        task = make(robot, num_envs=6)
        task.reset()
        motion = task.sims.motion.copy()
        motion[:, 3:7] = [0, 1, 0, 0]
        task.sims.place(np.arange(6), motion)
        for _ in range(60):
            task.sims.step()
        x, y, z = columns(*task.sims.qpos[:, :3].T)
        above = z - task._ground.field.height(x, y)
        assert (above > 0.02).all()
        assert (above < 0.5).all()


@pytest.mark.parametrize("robot", ["go2", "g1"])
def test_samples_are_the_grounds_height_minus_the_bases_on_a_grid_that_turns_with_the_heading(robot):
    task = make(robot, num_envs=6)
    task.reset(seed=3)
    motion = task.sims.motion.copy()
    motion[:, :2] += [1.4, 0.9]  # off the platform
    motion[:, 2] += 1.0
    task.sims.place(np.arange(6), motion)
    task.advance(still(task))
    rays, places = Rays(task._ground.field), task._ground._terrain.sample_points.T
    assert len(places) == 54
    assert places[0].tolist() == pytest.approx([-0.8, -0.5])
    assert places[1].tolist() == pytest.approx([-0.8, -0.3])
    for env in range(6):
        x, y, z = task.sims.qpos[env, :3]
        turn = rotation_matrix(task.sims.qpos[env, 3:7, None].astype(np.float32))[..., 0]
        yaw = math.atan2(turn[1, 0], turn[0, 0])
        cos, sin = math.cos(yaw), math.sin(yaw)
        expected = [rays.height(x + cos * a - sin * b, y + sin * a + cos * b) - z for a, b in places.tolist()]
        np.testing.assert_allclose(task.next_observation["critic"][env, CRITIC[robot] :], expected, atol=2e-3)
    assert task.next_observation["critic"][:, CRITIC[robot] :].std(axis=1).max() > 0.05


@pytest.mark.parametrize("robot", ["go2", "g1"])
def test_the_actor_sees_none_of_it(robot):
    task, plain = make(robot), make(robot, terrain=None)
    spec, flat = task.task_spec(), plain.task_spec()
    assert (spec.actor_size, spec.critic_size) == (flat.actor_size, flat.critic_size + 54)
    assert [metric.name for metric in spec.metrics] == [*(metric.name for metric in flat.metrics), LEVEL_TAG]
    contract, plain_contract = task.contract(), plain.contract()
    assert contract == plain_contract


def test_heights_in_rewards_are_above_the_ground_beneath():
    task = make(terrain=dataclasses.replace(SMALL, start_levels=3), num_envs=24)
    task.reset(seed=2)
    motion = task.sims.motion.copy()
    motion[:, :2] += [1.3, 0.8]
    motion[:, 2] += 0.4
    task.sims.place(np.arange(24), motion)
    task.advance(still(task))
    rays = Rays(task._ground.field)
    base = [z - rays.height(x, y) for x, y, z in task.sims.qpos[:, :3].tolist()]
    np.testing.assert_allclose(task.terms[4], np.square(np.array(base) - 0.3), atol=1e-3)
    swing = task.next_observation["critic"][:, 45:49] >= 0.6
    feet = task._feet.reshape(24, 4, 3)
    above = np.array([[z - rays.height(x, y) for x, y, z in robot] for robot in feet.tolist()])
    expected = (np.exp(-np.square(above - 0.1) / 0.01) * swing).mean(axis=1)
    np.testing.assert_allclose(task.terms[8], expected, atol=1e-3)
    assert np.std(base) > 0.05


def test_a_g1_has_fallen_by_its_height_above_the_ground_and_steps_by_that_of_its_feet():
    pit = Terrain(kinds=("slope_up",), levels=1, slope=(0.4, 0.4))  # the platform is 1.2 m below the edge
    task = make("g1", terrain=pit, num_envs=4)
    task.reset()
    assert (task.sims.qpos[:, 2] < 0).all()
    task.advance(still(task))
    assert not task.terminated.any()
    assert (task.terms[3] > 0.6).all()  # feet_phase; feet 1.2 m down would earn nothing


def test_soles_touch_a_flat_platform_as_they_touch_the_floor():
    field = HeightField(Terrain(kinds=("stairs_down",), levels=1))
    rng = np.random.default_rng(0)
    quat = np.array([1.0, 0, 0, 0])[:, None] + rng.normal(0, 0.1, (2, 4, 300))
    quat = (quat / np.linalg.norm(quat, axis=1, keepdims=True)).astype(np.float32)
    height = rng.uniform(-0.02, 0.03, (2, 300)).astype(np.float32)
    foot = np.stack([rng.uniform(-0.5, 0.5, (2, 300)), rng.uniform(-0.5, 0.5, (2, 300)), height], axis=1)
    foot[:, 2] += field.centres[0, 0, 2]
    plain = touching(height, quat)
    agree = touching_field(foot.astype(np.float32), quat, field) == plain
    assert agree.mean() > 0.998  # the last bit may decide
    assert 0.2 < plain.mean() < 0.8


def test_levels_move_by_distance_and_by_the_commanded_way():
    ground = Ground(Terrain(levels=5), 6)
    ground.level[:] = 2
    begin = ground.begin(np.arange(6))
    place = begin[:, :2].T.copy()
    place[0, [0, 3, 5]] += 4.1  # beyond half a tile: 0 up, 3 fell there, 5 walked too little but went far
    place[1, 4] += 3.9  # not beyond it
    ground.walked[:] = [9.0, 4.9, 5.1, 9.0, 9.0, 1.0]
    failed = np.array([False, False, False, True, False, False])
    ground.move(np.random.default_rng(0), np.arange(6), place, np.full(6, 10.0), failed)
    assert ground.level.tolist() == [3, 1, 2, 2, 2, 3]
    ground.begin(np.array([1]))
    assert ground.walked[:3].tolist() == pytest.approx([9.0, 0.0, 5.1])


def test_level_0_is_the_lowest_and_above_the_highest_any_level_follows():
    ground = Ground(Terrain(levels=4), 600)
    ids, rng = np.arange(600), np.random.default_rng(0)
    ground.move(rng, ids, ground.begin(ids)[:, :2].T, np.ones(600), np.zeros(600, bool))
    assert not ground.level.any()
    ground.level[:] = 3
    ground.move(rng, ids, ground.begin(ids)[:, :2].T + 5, np.zeros(600), np.zeros(600, bool))
    assert np.bincount(ground.level, minlength=4).min() > 100


def test_without_the_curriculum_levels_are_drawn_once_from_all():
    task = make(num_envs=60, terrain=dataclasses.replace(SMALL, curriculum=False), episode_s=0.04)
    task.reset()
    levels = task._ground.level.copy()
    assert np.bincount(levels, minlength=3).min() > 5
    for _ in range(6):
        task.advance(still(task))
    np.testing.assert_array_equal(task._ground.level, levels)
    task.reset()
    assert (task._ground.level != levels).any()


def test_the_first_levels_are_the_lowest():
    task = make(num_envs=60, terrain=dataclasses.replace(SMALL, start_levels=2))
    task.reset()
    assert set(task._ground.level.tolist()) == {0, 1}


@pytest.mark.parametrize("robot", ["go2", "g1"])
def test_an_episode_moves_its_environment_and_the_mean_level_is_counted(robot):
    task = make(robot, num_envs=4, terrain=dataclasses.replace(SMALL, start_levels=1), episode_s=0.04)
    task.reset()
    task._now.command[:2] = [[1.0], [0.0]]
    task.advance(still(task))
    task.sims.qpos[2, 0] += 3.6  # far from its tile's middle
    task.sims.qpos[2, 2] += 1.0
    task._ground.walked[1:] = 10.0
    task.advance(still(task))
    assert task.truncated.all()
    assert task._ground.level.tolist() == [0, 0, 1, 0]
    assert task.totals[-1].tolist() == [0, 4]  # as it was during the episodes
    assert task.metrics[-1].name == LEVEL_TAG
    assert task.sims.qpos[2, 0] == pytest.approx(task._ground.field.centres[1, 2, 0], abs=0.5)
    task.advance(still(task))
    task.advance(still(task))
    assert task.totals[-1].tolist() == [1, 8]


def test_the_way_along_the_command_adds_up():
    ground = Ground(SMALL, 3)
    command = np.array([[2.0, 0.0, 0.0], [0.0, -1.0, 0.0]], np.float32)
    velocity = np.array([[0.5, 9.0, 1.0], [7.0, 1.0, 1.0]], np.float32)
    for _ in range(10):
        ground.count(velocity, command, 0.02)
    np.testing.assert_allclose(ground.walked, [0.1, -0.2, 0.0], rtol=1e-5)


@pytest.mark.parametrize("robot", ["go2", "g1"])
def test_whoever_leaves_the_field_is_cut_off_as_by_the_time_limit(robot):
    task = make(robot, num_envs=3)
    task.reset()
    task.sims.qpos[:, :2] = [[9.4, 0], [9.6, 0], [0, -18.6]]  # the field ends at 10 and 19
    task.sims.qpos[:, 2] = 1.0
    task.advance(still(task))
    assert task.truncated.tolist() == [False, True, True]
    assert not task.terminated.any()


SETTINGS = {
    "go2": {"noise": Go2Noise(), "pushes": Go2Pushes(interval_s=0.1), "randomization": Go2Randomization()},
    "g1": {"randomization": G1Randomization(), "physics": "faithful"},
}


@pytest.mark.parametrize("robot", ["go2", "g1"])
def test_state_continues_bit_for_bit(robot):
    straight = make(robot, episode_s=0.2, stagger=True, **SETTINGS[robot])
    resumed = make(robot, episode_s=0.2, stagger=True, **{**SETTINGS[robot], "seed": 99})
    straight.reset()

    def play(task, seed):
        action = np.random.default_rng(seed).uniform(-1, 1, task.action_space.shape)
        task._ground.walked += 0.3  # so that some levels stay
        task.advance(action.astype(np.float32))

    for step in range(17):
        play(straight, step)
    assert straight._ground.walked.any()
    resumed.set_state(straight.get_state())
    levels = set()
    for step in range(25):
        for task in (straight, resumed):
            play(task, step)
        for group in ("actor", "critic"):
            np.testing.assert_array_equal(resumed.observation[group], straight.observation[group])
        np.testing.assert_array_equal(resumed.reward, straight.reward)
        np.testing.assert_array_equal(resumed.totals, straight.totals)
        np.testing.assert_array_equal(resumed._ground.level, straight._ground.level)
        levels.update(straight._ground.level.tolist())
    assert len(levels) > 1


@pytest.mark.parametrize("column", [0, 2, 4])  # along x, height, quaternion
def test_a_broken_state_ends_that_environment_alone(column):
    task = make(num_envs=3)
    task.reset()
    level = task._ground.level.copy()
    task.sims.qpos[1, column] = np.nan
    task.advance(still(task))
    assert task.terminated.tolist() == [False, True, False]
    assert task._ground.level[1] <= level[1]
    assert all(np.isfinite(rows).all() for rows in task.observation.values())


def mirror(rule, rows):
    return rows[..., list(rule.index)] * np.array(rule.sign, np.float32)


@pytest.mark.parametrize("robot", ["go2", "g1"])
def test_in_the_mirror_left_and_right_samples_change_places(robot):
    critic = make(robot).mirrors["critic"]
    assert sorted(critic.index) == list(range(CRITIC[robot] + 54))
    assert critic.index[: CRITIC[robot]] == TASKS[robot].mirrors["critic"].index
    rows = np.arange(1.0, len(critic.index) + 1)
    np.testing.assert_array_equal(mirror(critic, mirror(critic, rows)), rows)
    assert len(TASKS[robot].mirrors["critic"].index) == CRITIC[robot]  # flat ground keeps its own


def test_a_mirrored_robot_on_symmetric_ground_sees_mirrored_samples():
    terrain = Terrain(kinds=("slope_up",), levels=1, slope=(0.4, 0.4))  # a pit, symmetric about y = 0
    ground, rng = Ground(terrain, 40), np.random.default_rng(0)
    x, y, yaw = rng.uniform(-3, 3, 40), rng.uniform(-3, 3, 40), rng.uniform(-np.pi, np.pi, 40)

    def samples(side):
        seen = np.zeros((terrain.num_samples, 40), np.float32)
        zero = np.zeros(40)
        quat = np.array([np.cos(yaw / 2), zero, zero, side * np.sin(yaw / 2)], np.float32)
        position = np.array([x, side * y, zero + 0.3], np.float32)
        above = ground.sense(position, rotation_matrix(quat), seen)
        return above, seen.T

    (above, seen), (above_image, image) = samples(1), samples(-1)
    rule = mirrored(Mirror(index=(), sign=()), terrain)
    # A cell across a fold of the ground is split along one diagonal, which the mirror turns into the other.
    np.testing.assert_allclose(image, mirror(rule, seen), atol=0.021)
    np.testing.assert_allclose(above_image, above, atol=0.021)
    assert np.abs(image - seen).max() > 0.2


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("kinds", (), "task.terrain.kinds is []; allowed: one or more of rough, slope_up"),
        ("kinds", ("stair_up",), "task.terrain.kinds is ['stair_up']; did you mean stairs_up?"),
        ("levels", 0, "task.terrain.levels is 0; allowed: 1 to 100"),
        ("start_levels", 0, "task.terrain.start_levels is 0; allowed: 1 to 100"),
        ("slope", (0.4, 0.1), "task.terrain.slope is [0.4, 0.1]; allowed: two finite numbers, the smaller first"),
        ("stair_height", (-0.1, 0.1), "task.terrain.stair_height is [-0.1, 0.1]; allowed: 0 or more"),
        ("tile_m", 2.0, "task.terrain.tile_m is 2.0; allowed: 2.2 to 40 m"),
        ("tile_m", 8.05, "task.terrain.tile_m is 8.05; allowed: a whole number of resolution_m = 0.1 m"),
        ("platform_m", 1.0, "task.terrain.platform_m is 1.0; allowed: 1.6 to 20 m"),
        ("resolution_m", math.nan, "task.terrain.resolution_m is nan; allowed: 0.02 to 0.5 m"),
        ("border_m", 0.0, "task.terrain.border_m is 0.0; allowed: 1 to 100 m"),
        ("sample_spacing_m", 0.0, "task.terrain.sample_spacing_m is 0.0; allowed: 0.02 to 10 m"),
        ("seed", -1, "task.terrain.seed is -1; allowed: 0 or more"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(field, value, said):
    with pytest.raises(UserError) as refused:
        Terrain(**{field: value})
    assert str(refused.value).startswith(said)
    assert "\n" not in str(refused.value)


def test_a_file_of_ones_own_needs_the_floor_that_terrain_replaces(tmp_path):
    text = go2.MJCF.read_text().replace('name="floor" type="plane"', 'name="ground" type="plane"')
    own = tmp_path / "own.xml"
    own.write_text(text)
    make(terrain=None, mjcf=str(own))
    with pytest.raises(UserError, match=r"task.mjcf is .*there is no geom floor"):
        make(mjcf=str(own))
