"""G1 follows velocity commands on flat ground or terrain, stepping to a clock.

Control step 0.02 s. Actor observation (98): angular velocity and projected gravity of the torso, joint angles from the
stand pose, joint rates, last action, command, phase of the left and the right foot [rad]; the critic's (101) adds the
velocity at the pelvis's inertial unit in the pelvis's frame, and has no noise; on terrain it ends with samples of
the ground's height. Actions (29): joint targets as offsets
from the stand pose, in joint order: left leg, right leg, waist, left arm, right arm.

What is derived from the pelvis and the joints is current; positions and orientations of the feet are those before the
last physics step (1/150 s old).
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from unilab_fabric.envs import observations, randomization, rewards
from unilab_fabric.envs.batch import Rows, Simulations, lever_matrix, point_velocity_b, rotation_matrix
from unilab_fabric.envs.commands import Range, VelocityCommands, check_range
from unilab_fabric.envs.robots import g1
from unilab_fabric.envs.robots.model import Physics, contract
from unilab_fabric.envs.terrain import LEVEL_TAG, START_REACH, Ground, HeightField, Terrain, mirrored
from unilab_fabric.envs.vector_env import Array, Floats, Ids, Mask, TaskEnv, control_steps
from unilab_fabric.errors import UserError
from unilab_fabric.spaces import Mirror

GAIT_HZ = 1.5
SWING_HEIGHT = 0.09  # m, of a foot's site at the middle of its swing
STANDS_BELOW = 0.2  # m/s: a smaller planar command is none
AIR_TIME_S = (0.05, 0.5)  # a step of such a length is rewarded
MOVES_ABOVE = 0.5  # m/s and rad/s together: what counts as a command to move

ACTOR_SIZE, CRITIC_SIZE = 98, 101
JOINTS = len(g1.JOINTS)


@dataclass(frozen=True, kw_only=True)
class G1Rewards:
    """Weight per second of each reward term; a term with weight 0 is reported all the same."""

    tracking_lin_vel: float = 2.0
    """exp(-error^2 / 0.25) of the commanded planar velocity."""
    tracking_ang_vel: float = 1.5
    """exp(-error^2 / 0.25) of the commanded yaw rate."""
    alive: float = 10.0
    """1 in every step."""
    feet_phase: float = 5.0
    """exp(-error^2 / foot_sigma) of both feet's heights from what their phase asks for."""
    feet_air_time: float = 0.0
    """Feet that have been in the air for 0.05 to 0.5 s, where there is a command to move."""
    ang_vel_xy: float = -1.0
    """Squared roll and pitch rates of the torso [rad^2/s^2]."""
    orientation: float = -10.0
    """Squared horizontal part of the torso's up axis."""
    action_rate: float = -4.0
    """Squared change of the action from step to step."""
    pose: float = -0.5
    """Squared distance of the joints from the stand pose [rad^2], waist and arms counting 50, hip yaw and ankles 5."""
    feet_ori: float = -20.0
    """Tilt of the soles, half of 1 - cos for each."""
    lin_vel_z: float = 0.0
    """Squared vertical velocity of the pelvis [m^2/s^2]."""
    base_height: float = 0.0
    """Squared distance of the pelvis from 0.754 m above the floor [m^2]."""


@dataclass(frozen=True, kw_only=True)
class G1Noise:
    """Half widths of the uniform noise on what the actor observes, before scales."""

    angular_velocity: float = 0.2
    """[rad/s]"""
    gravity: float = 0.05
    """Of the unit vector's components."""
    joint_position: float = 0.01
    """[rad]"""
    joint_velocity: float = 1.5
    """[rad/s]"""


@dataclass(frozen=True, kw_only=True)
class G1Randomization:
    """Ranges of what differs between robots, drawn at every reset; null leaves a quantity alone."""

    kp: Range | None = (0.9, 1.1)
    """Factor on each servo's stiffness."""
    kd: Range | None = (0.9, 1.1)
    """Factor on each servo's damping."""

    def __post_init__(self) -> None:
        for name, limits in vars(self).items():
            if limits is not None:
                check_range(f"task.randomization.{name}", limits)


@dataclass(frozen=True, kw_only=True)
class PenaltyCurriculum:
    """A factor on all negative weights that grows as episodes get longer."""

    low: float = 0.0625
    """Factor at the start, and the least."""
    high: float = 0.125
    """The greatest."""
    shorter_than: int = 150
    """Mean episode length [control steps] below which the factor falls."""
    longer_than: int = 750
    """Mean episode length [control steps] above which it grows."""
    rate: float = 0.001
    """Relative change at each tick in which an episode ended."""

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high:
            raise UserError("task.curriculum.low", self.low, f"allowed: 0 to task.curriculum.high = {self.high}")


_POSE = {"hip_pitch": 0.01, "hip_roll": 1.0, "hip_yaw": 5.0, "knee": 0.01, "ankle_pitch": 5.0, "ankle_roll": 5.0}
POSE_WEIGHTS = np.array([_POSE.get(part.partition("_")[2], 50.0) for part in g1.PARTS], np.float32)[:, None]
"""What each joint counts in the pose term, (29, 1)."""

SCALES = np.concatenate([[0.25] * 3, [1.0] * 3, [1.0] * 29, [0.05] * 29, [1.0] * 34, [2.0] * 3]).astype(np.float32)
"""(101,): factors of the critic's observation, the first 98 the actor's."""
MEASURED = slice(0, 64)
"""The part of an observation that sensors would measure, and noise is added to."""


def _joint_mirror() -> tuple[list[int], list[float]]:
    """For each joint: its opposite, and whether its turn changes sign in a mirror, as rolls and yaws do."""
    swap = {"left": "right", "right": "left"}
    index, sign = [], []
    for part in g1.PARTS:
        side, _, rest = part.partition("_")
        index.append(g1.PARTS.index(f"{swap[side]}_{rest}" if side in swap else part))
        sign.append(-1.0 if part.endswith(("_roll", "_yaw")) else 1.0)
    return index, sign


def _mirror(*parts: tuple[list[int], list[float]]) -> Mirror:
    index: list[int] = []
    signs: list[float] = []
    for places, part_signs in parts:
        start = len(index)
        index += [start + place for place in places]
        signs += part_signs
    return Mirror(index=tuple(index), sign=tuple(signs))


_VECTOR = ([0, 1, 2], [1.0, -1.0, 1.0])  # a velocity, or gravity
_ROTATION = ([0, 1, 2], [-1.0, 1.0, -1.0])  # an angular velocity
_COMMAND = ([0, 1, 2], [1.0, -1.0, -1.0])  # forward, left, turn left
_FEET = ([1, 0], [1.0, 1.0])
_ACTOR = (_ROTATION, _VECTOR, _joint_mirror(), _joint_mirror(), _joint_mirror(), _COMMAND, _FEET)


class _Observed:
    """The critic's observation of n robots without its scales, one component per row, by name."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        self.angular_velocity = rows[0:3]
        self.gravity = rows[3:6]
        self.joint_offset = rows[6:35]
        self.joint_rate = rows[35:64]
        self.action = rows[64:93]
        self.command = rows[93:96]
        self.phase = rows[96:98]
        self.velocity = rows[98:101]
        self.ground = rows[101:]  # height samples; none on flat ground


class G1WalkFlat(TaskEnv):
    """G1 follows velocity commands on flat ground: 29 position targets, a stepping clock, 50 Hz."""

    mirrors = {  # noqa: RUF012  the same for all
        "actor": _mirror(*_ACTOR),
        "critic": _mirror(*_ACTOR, _VECTOR),
        "action": _mirror(_joint_mirror()),
    }

    def __init__(
        self,
        num_envs: int,
        *,
        physics: Physics = "fast",
        episode_s: float = 20.0,
        action_scale: float = 1.0,
        rewards: G1Rewards = G1Rewards(),
        foot_sigma: float = 0.04,
        reward_scale: float = 1.0,
        curriculum: PenaltyCurriculum | None = PenaltyCurriculum(),
        max_tilt: float = 65.0,
        min_height: float = 0.3,
        commands: VelocityCommands = VelocityCommands(),  # noqa: B008  frozen
        scaled: bool = True,
        noise: G1Noise | None = None,
        randomization: G1Randomization | None = None,
        terrain: Terrain | None = None,
        stagger: bool = False,
        mjcf: str | None = None,
        num_threads: int = 0,
        seed: int = 0,
    ) -> None:
        """Makes the environments.

        Args:
            num_envs: Environments per rank.
            physics: Solver settings: fast for training, faithful for judging.
            episode_s: Time limit of an episode [s].
            action_scale: Joint offset at action 1 [rad].
            rewards: Weight per second of each reward term.
            foot_sigma: Squared error of the feet's heights [m^2] at which their reward has fallen to 1/e.
            reward_scale: Factor on the whole reward, so that returns fit the critic's range.
            curriculum: How negative weights grow with the length of episodes; null for their full size at once.
            max_tilt: Tilt of the torso at which it has fallen [degrees].
            min_height: Height of the pelvis below which it has fallen [m].
            commands: Ranges of the commanded velocity; a planar one below 0.2 m/s becomes none.
            scaled: Scale angular velocity by 0.25, joint rates by 0.05 and the critic's velocity by 2.
            noise: Noise on the actor's observation; null for none.
            randomization: Differences between robots; null for none.
            terrain: Rough ground with a curriculum, and height samples for the critic; null for flat ground.
            stagger: End the first episodes after a random part of the time limit, so that time-outs do not coincide.
            mjcf: MJCF file in place of the shipped robot and floor, with the same joints, actuators, sensors and feet.
            num_threads: Physics threads, 0 for all allowed cores.
            seed: Seed of resets, commands, noise and randomisation.
        """
        positive = [("action_scale", action_scale), ("foot_sigma", foot_sigma), ("reward_scale", reward_scale)]
        for name, value in [*positive, ("max_tilt", max_tilt)]:
            if not value > 0:
                raise UserError(f"task.{name}", value, "allowed: more than 0")
        super().__init__(
            num_envs=num_envs,
            actor_size=ACTOR_SIZE,
            critic_size=CRITIC_SIZE + (0 if terrain is None else terrain.num_samples),
            action_low=[-1.0] * JOINTS,
            action_high=[1.0] * JOINTS,
            episode_steps=control_steps(episode_s, g1.CONTROL_STEP_S),
            reward_terms=dataclasses.asdict(rewards),
            reward_factor=g1.CONTROL_STEP_S * reward_scale,
            figures=("planar_error", "yaw_error", *(("penalty_scale",) if curriculum else ())),
            falls=True,
            gauges=() if terrain is None else (LEVEL_TAG,),
            stagger=stagger,
            seed=seed,
        )
        self._ground = None if terrain is None else Ground(terrain, num_envs)
        model = g1.load(physics, mjcf, None if self._ground is None else self._ground.field.compile)
        self.sims = Simulations(model, num_envs, substeps=g1.PHYSICS[physics].substeps, num_threads=num_threads)
        self._feet = self.sims.sensors(g1.FOOT_SENSORS)
        self._action_scale = action_scale
        self._commands = commands
        self._foot_sigma = foot_sigma
        self._least_up = math.cos(math.radians(max_tilt))
        self._min_height = min_height
        sampled = np.ones(self.observation["critic"].shape[1] - CRITIC_SIZE, np.float32)
        self._scales = np.concatenate([SCALES if scaled else np.ones_like(SCALES), sampled])
        self._noise = None if noise is None else _noise_widths(noise) * self._scales[MEASURED]
        self._curriculum = curriculum
        self._servos = None if randomization is None else _Servos(self.sims, randomization)
        self._term = dict(zip(dataclasses.asdict(rewards), self.terms, strict=True))
        self._penalties = np.array([weight < 0 for weight in dataclasses.asdict(rewards).values()])
        self._stand = np.array(g1.STAND_JOINTS)
        self._stand_column = self._stand[:, None].astype(np.float32)
        self._lever = lever_matrix(g1.IMU_PELVIS)
        # x, y, yaw, velocities of the pelvis, command, phase of a new episode
        reach = [(-START_REACH, START_REACH)] * 2 + [(-math.pi, math.pi)] + [(-0.5, 0.5)] * 6
        reach += [commands.forward, commands.left, commands.turn, (0.0, 2 * math.pi)]
        self._start_low, high = np.array(reach).T
        self._start_width = high - self._start_low
        self._now = _Observed(np.zeros((self._scales.size, num_envs + 16), np.float32)[:, :num_envs])
        self._action_change = np.zeros((JOINTS, num_envs), np.float32)
        self._air_time = np.zeros((2, num_envs), np.float32)
        self._progress = np.array([0.0 if curriculum is None else curriculum.low, 0.0])  # factor, mean length
        own = {"now": self._now.rows, "air_time": self._air_time, "curriculum": self._progress}
        self.mutable.update({**own, **self.sims.mutable})
        if terrain is not None and self._ground is not None:
            self.mutable.update(self._ground.mutable)
            self.mirrors = {**self.mirrors, "critic": mirrored(self.mirrors["critic"], terrain)}

    def planar_motion(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """As in the base."""
        return self._now.command[:2, 0].copy(), self._now.velocity[:2, 0].copy()

    def contract(self) -> dict[str, Any]:
        """As in the base."""
        scale = iter(self._scales.tolist())

        def term(name: str, size: int, unit: str, frame: str) -> dict[str, Any]:
            scales = [next(scale) for _ in range(size)]
            return {"name": name, "size": size, "unit": unit, "frame": frame, "scale": round(scales[0], 6)}

        own = contract(
            self.sims.model,
            "unitree_g1_29dof",
            joints=g1.JOINTS,
            stand=g1.STAND_JOINTS,
            substeps=self.sims.substeps,
            action_scale=self._action_scale,
            observation=[
                term("angular_velocity", 3, "rad/s", "torso"),
                term("projected_gravity", 3, "1", "torso: R'(0, 0, -1)"),
                term("joint_angle_minus_default", JOINTS, "rad", "joints"),
                term("joint_rate", JOINTS, "rad/s", "joints"),
                term("last_action", JOINTS, "1", "joints"),
                term("command", 3, "m/s, m/s, rad/s", "pelvis: forward, left, turn left"),
                term("gait_phase", 2, "rad in [0, 2 pi)", "feet left, right"),
            ],
        )
        gait = {"rate_hz": GAIT_HZ, "offsets": [0.0, 0.5], "advances": "before each observation"}
        ranges = {name: list(limits) for name, limits in vars(self._commands).items()}
        return {**own, "gait": gait, "command": ranges}

    def _restart(self) -> None:
        if self._ground is not None:
            self._ground.restart(self.np_random)

    def _begin(self, ids: Ids) -> None:
        """The robot stands near the origin or the middle of its tile, any way round, and moves a little."""
        rng, n = self.np_random, ids.size
        start = self._start_low + self._start_width * rng.random((n, self._start_low.size))
        motion = np.zeros((n, 71))
        motion[:, :2] = start[:, :2]
        motion[:, 2] = g1.STAND_HEIGHT
        if self._ground is not None:
            motion[:, :3] += self._ground.begin(ids)
        motion[:, 3], motion[:, 6] = np.cos(start[:, 2] / 2), np.sin(start[:, 2] / 2)
        motion[:, 7:36] = self._stand
        motion[:, 36:42] = start[:, 3:9]
        self.sims.place(ids, motion)
        if self._servos is not None:
            self._servos.draw(rng, ids)
        first = _Observed(np.zeros((len(self._now.rows), n), np.float32))
        command = start[:, 9:12].T
        first.command[:] = command
        first.command[:2, np.hypot(command[0], command[1]) <= STANDS_BELOW] = 0.0
        first.phase[:] = start[:, 12] + np.array([[0.0], [math.pi]])
        first.phase[first.phase >= 2 * math.pi] -= 2 * math.pi
        self._now.rows[:, ids] = first.rows
        self._air_time[:, ids] = 0.0

    def _simulate(self, action: Array) -> Mask | None:
        np.subtract(action.T, self._now.action, out=self._action_change)
        self._now.action[:] = action.T
        self.sims.ctrl[:] = action * self._action_scale + self._stand
        return self.sims.step()

    def _evaluate(self) -> None:
        now, term = self._now, self._term
        now.phase += np.float32(2 * math.pi * GAIT_HZ * g1.CONTROL_STEP_S)
        now.phase[now.phase >= 2 * math.pi] -= np.float32(2 * math.pi)
        height = self._sense(self.sims.motion, now)
        planar_error = now.command[:2] - now.velocity[:2]
        yaw_error = now.command[2] - now.angular_velocity[2]
        feet = self._feet.T.copy()
        foot_height, foot_quat = feet[[2, 5]], feet[6:].reshape(2, 4, -1)
        if self._ground is None:
            touches = touching(foot_height, foot_quat)
        else:
            touches = touching_field(feet[:6].reshape(2, 3, -1), foot_quat, self._ground.field)
            foot_height -= self._ground.field.height(feet[[0, 3]], feet[[1, 4]])
            self._ground.count(now.velocity[:2], now.command[:2], g1.CONTROL_STEP_S)
            self.truncated |= self._ground.field.outside(*self.sims.qpos[:, :2].T)

        rewards.tracking_lin_vel(planar_error, 0.25, out=term["tracking_lin_vel"])
        rewards.tracking_ang_vel(yaw_error, 0.25, out=term["tracking_ang_vel"])
        term["alive"][:] = 1.0
        rewards.feet_phase(foot_height, swing_height(now.phase), self._foot_sigma, out=term["feet_phase"])
        self._count_air_time(touches, out=term["feet_air_time"])
        rewards.ang_vel_xy(now.angular_velocity, out=term["ang_vel_xy"])
        rewards.sum_of_squares(now.gravity[:2], out=term["orientation"])
        rewards.action_rate(self._action_change, out=term["action_rate"])
        rewards.weighted_pose(now.joint_offset, POSE_WEIGHTS, out=term["pose"])
        rewards.feet_ori(foot_quat, out=term["feet_ori"])
        rewards.lin_vel_z(now.velocity, out=term["lin_vel_z"])
        rewards.base_height(height, 0.754, out=term["base_height"])
        if self._curriculum is not None:
            self.terms[self._penalties] *= np.float32(self._progress[0])
            self.figures[2] = self._progress[0]

        np.hypot(planar_error[0], planar_error[1], out=self.figures[0])
        np.abs(yaw_error, out=self.figures[1])
        np.greater(now.gravity[2], -self._least_up, out=self.terminated)
        self.terminated |= height < self._min_height

    def _count_air_time(self, touches: Mask, out: Array) -> None:
        """Feet (2, N) in the air for a rewarded time, where the command asks for motion (N,)."""
        self._air_time += g1.CONTROL_STEP_S
        self._air_time[touches] = 0.0
        low, high = AIR_TIME_S
        np.sum((self._air_time > low) & (self._air_time < high), axis=0, out=out)
        command = self._now.command
        out *= np.hypot(command[0], command[1]) + np.abs(command[2]) > MOVES_ABOVE

    def _observe(self, ids: Ids | slice, actor: Array, critic: Array) -> None:
        now = self._now
        if not isinstance(ids, slice):
            now = _Observed(now.rows[:, ids])
            self._sense(self.sims.motion[ids], now)
        np.multiply(now.rows.T, self._scales, out=critic)
        actor[:] = critic[:, :ACTOR_SIZE]
        if self._noise is not None:
            actor[:, MEASURED] = observations.uniform_noise(self.np_random, actor[:, MEASURED], self._noise)

    def _finish_episodes(self, ids: Ids) -> None:
        if self._curriculum is not None:
            self._progress[:] = moved(self._progress, self._curriculum, self.episode_length[ids], self.num_envs)
        super()._finish_episodes(ids)
        if self._ground is not None:
            self.totals[-1] += self._ground.level.sum(), self.num_envs
            command = self._now.command[:, ids]
            commanded_m = np.hypot(command[0], command[1]) * self._time_limit[ids] * g1.CONTROL_STEP_S
            self._ground.move(self.np_random, ids, self.sims.qpos[ids, :2].T, commanded_m, self.terminated[ids])

    def _sense(self, motion: Rows, now: _Observed) -> Array:
        """Writes what n simulations (n, 71) are doing into their observations.

        Returns the pelvises' heights above the ground beneath them (n,) [m].
        """
        state = motion.T.astype(np.float32, order="C")
        pelvis = rotation_matrix(state[3:7])
        joints, rates, turning = state[7:36], state[42:71], state[39:42]
        waist = slice(g1.FIRST_WAIST, g1.FIRST_WAIST + 3)
        up, now.angular_velocity[:] = torso_motion(pelvis[2], turning, joints[waist], rates[waist])
        np.negative(up, out=now.gravity)
        np.subtract(joints, self._stand_column, out=now.joint_offset)
        now.joint_rate[:] = rates
        now.velocity[:] = point_velocity_b(pelvis, state[36:39], turning, self._lever)
        if self._ground is not None:
            return self._ground.sense(state[:3], pelvis, now.ground)
        height: Array = state[2]
        return height


def torso_motion(up_pelvis: Floats, turning: Floats, waist: Floats, rates: Floats) -> tuple[Array, Array]:
    """The world's up direction and the torso's angular velocity [rad/s], both (3, n) in the torso's frame.

    Args:
        up_pelvis: (3, n), the world's up direction in the pelvis's frame.
        turning: (3, n), angular velocity of the pelvis in its own frame [rad/s].
        waist: (3, n), yaw, roll and pitch of the waist [rad], turned in this order about z, x and y.
        rates: (3, n), their rates [rad/s].
    """
    vectors = np.stack([up_pelvis, turning])  # (2, 3, n)
    for axis, angle, rate in zip((2, 0, 1), waist, rates, strict=True):
        first, second = (axis + 1) % 3, (axis + 2) % 3
        cos, sin = np.cos(angle), np.sin(angle)
        turned = vectors.copy()
        turned[:, first] = cos * vectors[:, first] + sin * vectors[:, second]
        turned[:, second] = cos * vectors[:, second] - sin * vectors[:, first]
        turned[1, axis] += rate
        vectors = turned
    return vectors[0], vectors[1]


def swing_height(phase: Floats) -> Array:
    """Height that a foot's phase asks for [m]: 0.09 at 0, 0 at half a cycle, a cubic between; phase [rad]."""
    share = np.mod(phase + math.pi, 2 * math.pi) / (2 * math.pi)  # 0 at -pi, 1/2 at 0
    s = np.where(share <= 0.5, 2 * share, 2 - 2 * share)
    return np.asarray(SWING_HEIGHT * s * s * (3 - 2 * s), np.float32)


def touching(foot_height: Floats, foot_quat: Floats) -> Mask:
    """Whether a corner of a sole touches flat ground, (2, n), from its site's height (2, n) [m] and turn (2, 4, n)."""
    w, x, y, z = foot_quat.swapaxes(0, 1)
    up = (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y))  # the world's up in the foot's frame
    corners = np.array(g1.CORNER_POINTS, np.float32) - np.array(g1.FOOT_SITE, np.float32)
    lowest = np.min([foot_height + sum(u * c for u, c in zip(up, corner, strict=True)) for corner in corners], axis=0)
    return np.asarray(lowest < g1.CORNER_RADIUS)


def touching_field(foot: Array, foot_quat: Array, field: HeightField) -> Mask:
    """Whether a corner of a sole touches a field (2, n), from its site's place (2, 3, n) [m] and turn (2, 4, n)."""
    turned = np.stack([rotation_matrix(quat) for quat in foot_quat])  # (2, 3, 3, n)
    offsets = np.array(g1.CORNER_POINTS, np.float32) - np.array(g1.FOOT_SITE, np.float32)
    corners = foot[:, None] + np.einsum("fijn,cj->fcin", turned, offsets)  # (2, 4, 3, n)
    distance = field.clearance(corners[:, :, 0], corners[:, :, 1], corners[:, :, 2])
    return np.asarray(distance.min(axis=1) < g1.CORNER_RADIUS)


def moved(
    progress: NDArray[np.float64], curriculum: PenaltyCurriculum, lengths: NDArray[np.int64], num_envs: int
) -> NDArray[np.float64]:
    """The curriculum's factor and mean episode length after a tick that ended episodes of these `lengths`."""
    factor, mean = progress
    window = max(1, 1000 * num_envs // 4096)
    mean += min(len(lengths) / window, 1.0) * (float(lengths.mean()) - mean)
    if mean < curriculum.shorter_than:
        factor *= 1.0 - curriculum.rate
    elif mean > curriculum.longer_than:
        factor *= 1.0 + curriculum.rate
    return np.array([min(max(factor, curriculum.low), curriculum.high), mean])


class _Servos:
    """Gains that differ between robots."""

    def __init__(self, sims: Simulations, ranges: G1Randomization) -> None:
        self._ranges = ranges
        self._gain, self._bias = sims.per_simulation("actuator_gainprm"), sims.per_simulation("actuator_biasprm")
        self._kp = sims.model.actuator_gainprm[:, 0].copy()
        self._kd = -sims.model.actuator_biasprm[:, 2].copy()

    def draw(self, rng: np.random.Generator, ids: Ids) -> None:
        """New gains for these environments."""
        shape = (ids.size, JOINTS)
        if self._ranges.kp is not None:
            kp = self._kp * randomization.servo_gain(rng, shape, self._ranges.kp)
            self._gain[ids, :, 0], self._bias[ids, :, 1] = kp, -kp
        if self._ranges.kd is not None:
            self._bias[ids, :, 2] = -self._kd * randomization.servo_gain(rng, shape, self._ranges.kd)


def _noise_widths(noise: G1Noise) -> Array:
    """(64,): half width for each of the actor's entries that a sensor measures."""
    base = [noise.angular_velocity] * 3 + [noise.gravity] * 3
    return np.array([*base, *[noise.joint_position] * JOINTS, *[noise.joint_velocity] * JOINTS], np.float32)
