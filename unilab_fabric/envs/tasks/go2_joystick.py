"""Go2 follows velocity commands on flat ground or terrain, trotting to a clock.

Control step 0.02 s. Actor observation (49): base angular velocity, projected gravity, joint angles from the stand pose,
joint rates, last action, command, gait phase of each foot; the critic's (52) adds the base's linear velocity, and has
no noise; on terrain it ends with samples of the ground's height. Velocities are at the inertial unit in the base frame.
Actions (12): joint targets as offsets from the stand pose, in joint order FL, FR, RL, RR by hip, thigh, calf.

Base quantities, joint angles and rates are current; the heights of the feet, and with them contacts, are those before
the last physics step (0.01 s old with fast physics, 0.005 s with faithful).
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
from unilab_fabric.envs.robots import go2
from unilab_fabric.envs.robots.model import Physics, contract
from unilab_fabric.envs.terrain import LEVEL_TAG, START_REACH, Ground, Terrain, mirrored
from unilab_fabric.envs.vector_env import Array, Ids, Mask, TaskEnv, control_steps
from unilab_fabric.errors import UserError
from unilab_fabric.spaces import Mirror

CONTROL_STEP_S = 0.02
MAX_TILT = math.radians(60)
"""A base tilted further has fallen [rad]."""

GAIT_HZ = 2.0
GAIT_OFFSETS = np.array([[0.0], [0.5], [0.5], [0.0]], np.float32)
"""Diagonal feet together: a trot; (4, 1) for FL, FR, RL, RR."""
STANCE = 0.6
"""Share of the cycle that a foot belongs on the floor."""

BASE_HEIGHT_TARGET = 0.3  # m
SWING_HEIGHT = 0.1  # m, of the foot's centre
SWING_WIDTH = 0.01  # m^2


@dataclass(frozen=True, kw_only=True)
class Go2Rewards:
    """Weight per second of each reward term; a term with weight 0 is reported all the same."""

    tracking_lin_vel: float = 1.0
    """exp(-error^2 / tracking_sigma) of the commanded planar velocity."""
    tracking_ang_vel: float = 0.2
    """exp(-error^2 / tracking_sigma) of the commanded yaw rate."""
    lin_vel_z: float = -5.0
    """Squared vertical velocity of the base [m^2/s^2]."""
    ang_vel_xy: float = -0.1
    """Squared roll and pitch rates [rad^2/s^2]."""
    base_height: float = -100.0
    """Squared distance of the base from 0.3 m above the floor [m^2]."""
    action_rate: float = -0.005
    """Squared change of the action from step to step."""
    similar_to_default: float = -0.1
    """Sum of the joints' distances from the stand pose [rad]."""
    contact: float = 0.24
    """Share of feet on the floor in stance and off it in swing."""
    swing_feet_z: float = 4.0
    """Mean over the feet of exp(-(height - 0.1 m)^2 / 0.01 m^2) in swing."""


@dataclass(frozen=True, kw_only=True)
class Go2Noise:
    """Half widths of the uniform noise on what the actor observes."""

    angular_velocity: float = 0.2
    """[rad/s]"""
    gravity: float = 0.05
    """Of the unit vector's components."""
    joint_position: float = 0.01
    """[rad]"""
    joint_velocity: float = 1.5
    """[rad/s]"""


@dataclass(frozen=True, kw_only=True)
class Go2Pushes:
    """Sudden changes of the base's velocity, each environment by itself."""

    interval_s: float = 15.0
    """Mean time between two pushes of an environment [s]."""
    planar: float = 1.0
    """Greatest change along world x and along y [m/s]."""
    vertical: float = 0.5
    """Greatest change along world z [m/s]."""

    def __post_init__(self) -> None:
        if not self.interval_s >= CONTROL_STEP_S:
            raise UserError("task.pushes.interval_s", self.interval_s, f"allowed: {CONTROL_STEP_S} s or more")


@dataclass(frozen=True, kw_only=True)
class Go2Randomization:
    """Ranges of what differs between robots, drawn at every reset; null leaves a quantity alone."""

    kp: Range | None = (31.5, 38.5)
    """Servo stiffness [N m/rad], each servo apart; 35 in the model."""
    kd: Range | None = (0.45, 0.55)
    """Servo damping [N m s/rad], each servo apart, on top of the joint's 0.5; 0 in the model."""
    base_mass: Range | None = (-1.5, 1.5)
    """Load added to the base [kg]."""
    base_com_x: Range | None = (-0.05, 0.05)
    """Shift of the base's centre of mass forward [m]."""
    friction: Range | None = (0.3, 1.2)
    """Sliding friction of the feet; 0.4 in the model."""

    def __post_init__(self) -> None:
        for name, limits in vars(self).items():
            if limits is not None:
                check_range(f"task.randomization.{name}", limits)


def _mirror(*parts: tuple[tuple[int, ...], tuple[int, ...]]) -> Mirror:
    """The mirror of a vector from its parts: for each entry, where in its part the image looks, and the sign."""
    index: list[int] = []
    signs: list[float] = []
    for places, part_signs in parts:
        start = len(index)
        index += [start + place for place in places]
        signs += part_signs
    return Mirror(index=tuple(index), sign=tuple(signs))


# Left-right: the legs change sides, and with them all that turns inward or outward.
_VECTOR = ((0, 1, 2), (1, -1, 1))  # a velocity, or gravity
_ROTATION = ((0, 1, 2), (-1, 1, -1))  # an angular velocity
_COMMAND = ((0, 1, 2), (1, -1, -1))  # forward, left, turn left
_LEGS = ((3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8), (-1, 1, 1) * 4)  # hip, thigh, calf by leg
_FEET = ((1, 0, 3, 2), (1, 1, 1, 1))
_ACTOR = (_ROTATION, _VECTOR, _LEGS, _LEGS, _LEGS, _COMMAND, _FEET)

ACTOR_SIZE, CRITIC_SIZE = 49, 52
MEASURED = slice(0, 30)
"""The part of an observation that sensors would measure, and noise is added to."""


class _Observed:
    """The critic's observation of n robots, one component per row, by name; the actor's is all but the velocity."""

    def __init__(self, rows: Array) -> None:
        self.rows = rows
        self.angular_velocity = rows[0:3]
        self.gravity = rows[3:6]  # projected: R'(0, 0, -1), which does not turn with the heading
        self.joint_offset = rows[6:18]
        self.joint_rate = rows[18:30]
        self.action = rows[30:42]
        self.command = rows[42:45]
        self.phase = rows[45:49]
        self.velocity = rows[49:52]
        self.ground = rows[52:]  # height samples; none on flat ground


class Go2JoystickFlat(TaskEnv):
    """Go2 follows velocity commands on flat ground: 12 position targets, a trot clock, 50 Hz."""

    mirrors = {  # noqa: RUF012  the same for all
        "actor": _mirror(*_ACTOR),
        "critic": _mirror(*_ACTOR, _VECTOR),
        "action": _mirror(_LEGS),
    }

    def __init__(
        self,
        num_envs: int,
        *,
        physics: Physics = "fast",
        episode_s: float = 20.0,
        action_scale: float = 0.25,
        rewards: Go2Rewards = Go2Rewards(),
        tracking_sigma: float = 0.5,
        reward_scale: float = 1.0,
        commands: VelocityCommands = VelocityCommands(),  # noqa: B008  frozen
        random_phase: bool = True,
        noise: Go2Noise | None = None,
        pushes: Go2Pushes | None = None,
        randomization: Go2Randomization | None = None,
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
            tracking_sigma: Squared tracking error [m^2/s^2, rad^2/s^2] at which its reward has fallen to 1/e.
            reward_scale: Factor on the whole reward, so that returns fit the critic's range.
            commands: Ranges of the commanded velocity.
            random_phase: Start the trot clock at a random phase at reset, instead of at 0.
            noise: Noise on the actor's observation; null for none.
            pushes: Pushes of the base; null for none.
            randomization: Differences between robots; null for none.
            terrain: Rough ground with a curriculum, and height samples for the critic; null for flat ground.
            stagger: End the first episodes after a random part of the time limit, so that time-outs do not coincide.
            mjcf: MJCF file in place of the shipped robot and floor, with the same joints, actuators, sensors and feet.
            num_threads: Physics threads, 0 for all allowed cores.
            seed: Seed of resets, commands, noise, pushes and randomisation.
        """
        for name, value in [
            ("action_scale", action_scale),
            ("tracking_sigma", tracking_sigma),
            ("reward_scale", reward_scale),
        ]:
            if not value > 0:
                raise UserError(f"task.{name}", value, "allowed: more than 0")
        super().__init__(
            num_envs=num_envs,
            actor_size=ACTOR_SIZE,
            critic_size=CRITIC_SIZE + (0 if terrain is None else terrain.num_samples),
            action_low=[-1.0] * 12,
            action_high=[1.0] * 12,
            episode_steps=control_steps(episode_s, CONTROL_STEP_S),
            reward_terms=dataclasses.asdict(rewards),
            reward_factor=CONTROL_STEP_S * reward_scale,
            figures=("planar_error", "yaw_error"),
            falls=True,
            gauges=() if terrain is None else (LEVEL_TAG,),
            stagger=stagger,
            seed=seed,
        )
        self._ground = None if terrain is None else Ground(terrain, num_envs)
        model = go2.load(physics, mjcf, None if self._ground is None else self._ground.field.compile)
        substeps = go2.PHYSICS[physics].substeps
        self.sims = Simulations(model, num_envs, substeps=substeps, num_threads=num_threads)
        self._feet = self.sims.sensors(go2.FOOT_SENSORS)
        self._action_scale = action_scale
        self._commands = commands
        self._tracking_sigma = tracking_sigma
        self._noise = None if noise is None else _noise_widths(noise)
        self._pushes = pushes
        self._robots = None if randomization is None else _RandomRobots(self.sims, randomization)
        self._term = dict(zip(dataclasses.asdict(rewards), self.terms, strict=True))
        self._stand = np.array(go2.STAND_JOINTS)
        self._stand_column = self._stand[:, None].astype(np.float32)
        self._lever = lever_matrix(go2.IMU_B)
        # x, y, yaw, base velocity, command, phase of a new episode
        reach = [(-START_REACH, START_REACH)] * 2 + [(-math.pi, math.pi)] + [(-0.5, 0.5)] * 6
        reach += [commands.forward, commands.left, commands.turn, (0.0, 1.0 if random_phase else 0.0)]
        self._start_low, high = np.array(reach).T
        self._start_width = high - self._start_low
        # Action, command and phase live here. Rows are a little longer than needed: with a power of two between them
        # they would compete for the same cache lines.
        self._now = _Observed(np.zeros((self.observation["critic"].shape[1], num_envs + 16), np.float32)[:, :num_envs])
        self._action_change = np.zeros((12, num_envs), np.float32)
        self.mutable.update({"now": self._now.rows, **self.sims.mutable})
        if terrain is not None and self._ground is not None:
            self.mutable.update(self._ground.mutable)
            self.mirrors = {**self.mirrors, "critic": mirrored(self.mirrors["critic"], terrain)}

    def planar_motion(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """As in the base."""
        return self._now.command[:2, 0].copy(), self._now.velocity[:2, 0].copy()

    def contract(self) -> dict[str, Any]:
        """As in the base."""

        def term(name: str, size: int, unit: str, frame: str) -> dict[str, Any]:
            return {"name": name, "size": size, "unit": unit, "frame": frame, "scale": 1.0}

        own = contract(
            self.sims.model,
            "unitree_go2",
            joints=go2.JOINTS,
            stand=go2.STAND_JOINTS,
            substeps=self.sims.substeps,
            action_scale=self._action_scale,
            observation=[
                term("angular_velocity", 3, "rad/s", "base"),
                term("projected_gravity", 3, "1", "base: R'(0, 0, -1)"),
                term("joint_angle_minus_default", 12, "rad", "joints"),
                term("joint_rate", 12, "rad/s", "joints"),
                term("last_action", 12, "1", "joints"),
                term("command", 3, "m/s, m/s, rad/s", "base: forward, left, turn left"),
                term("gait_phase", 4, "cycles in [0, 1)", "feet FL, FR, RL, RR"),
            ],
        )
        gait = {"rate_hz": GAIT_HZ, "offsets": GAIT_OFFSETS[:, 0].tolist(), "advances": "before each observation"}
        ranges = {name: list(limits) for name, limits in vars(self._commands).items()}
        return {**own, "gait": gait, "command": ranges}

    def set_state(self, state: dict[str, NDArray[Any]]) -> None:
        """As in the base; what MuJoCo derives from a robot's masses is derived again."""
        super().set_state(state)
        if self._robots is not None:
            self._robots.derive(np.arange(self.num_envs))

    def _restart(self) -> None:
        if self._ground is not None:
            self._ground.restart(self.np_random)

    def _begin(self, ids: Ids) -> None:
        """The robot stands near the origin or the middle of its tile, any way round, and moves a little."""
        rng, n = self.np_random, ids.size
        start = self._start_low + self._start_width * rng.random((n, self._start_low.size))
        motion = np.zeros((n, 37))
        motion[:, :2] = start[:, :2]
        motion[:, 2] = go2.STAND_HEIGHT
        if self._ground is not None:
            motion[:, :3] += self._ground.begin(ids)
        motion[:, 3:7] = _heading(start[:, 2], go2.STAND_PITCH)
        motion[:, 7:19] = self._stand
        motion[:, 19:25] = start[:, 3:9]
        self.sims.place(ids, motion)
        if self._robots is not None:
            self._robots.draw(rng, ids)
        first = _Observed(np.zeros((len(self._now.rows), n), np.float32))
        first.command[:] = start[:, 9:12].T
        first.phase[:] = observations.gait_phase(start[:, 12].astype(np.float32), GAIT_OFFSETS)
        self._now.rows[:, ids] = first.rows

    def _simulate(self, action: Array) -> Mask | None:
        np.subtract(action.T, self._now.action, out=self._action_change)
        self._now.action[:] = action.T
        self.sims.ctrl[:] = action * self._action_scale + self._stand
        if self._pushes is not None:
            self._push(self._pushes)
        return self.sims.step()

    def _evaluate(self) -> None:
        now, sigma = self._now, self._tracking_sigma
        observations.advance_phase(now.phase, GAIT_HZ * CONTROL_STEP_S)
        height = self._sense(self.sims.motion, now)
        planar_error = now.command[:2] - now.velocity[:2]
        yaw_error = now.command[2] - now.angular_velocity[2]
        feet = self._feet[:, 2::3].T.copy()
        from_ground = feet
        if self._ground is not None:
            x, y = self._feet[:, 0::3].T, self._feet[:, 1::3].T
            from_ground = self._ground.field.clearance(x, y, feet)
            feet -= self._ground.field.height(x, y)
            self._ground.count(now.velocity[:2], now.command[:2], CONTROL_STEP_S)
            self.truncated |= self._ground.field.outside(*self.sims.qpos[:, :2].T)
        touches = from_ground < go2.FOOT_RADIUS + go2.CONTACT_MARGIN  # on flat ground the same as a contact
        in_swing = now.phase >= STANCE

        term = self._term
        rewards.tracking_lin_vel(planar_error, sigma, out=term["tracking_lin_vel"])
        rewards.tracking_ang_vel(yaw_error, sigma, out=term["tracking_ang_vel"])
        rewards.lin_vel_z(now.velocity, out=term["lin_vel_z"])
        rewards.ang_vel_xy(now.angular_velocity, out=term["ang_vel_xy"])
        rewards.base_height(height, BASE_HEIGHT_TARGET, out=term["base_height"])
        rewards.action_rate(self._action_change, out=term["action_rate"])
        rewards.similar_to_default(now.joint_offset, out=term["similar_to_default"])
        rewards.contact(touches, in_swing, out=term["contact"])
        rewards.swing_feet_z(feet, in_swing, SWING_HEIGHT, SWING_WIDTH, out=term["swing_feet_z"])

        np.hypot(planar_error[0], planar_error[1], out=self.figures[0])
        np.abs(yaw_error, out=self.figures[1])
        np.greater(now.gravity[2], -math.cos(MAX_TILT), out=self.terminated)

    def _observe(self, ids: Ids | slice, actor: Array, critic: Array) -> None:
        now = self._now
        if not isinstance(ids, slice):
            now = _Observed(now.rows[:, ids])
            self._sense(self.sims.motion[ids], now)
        critic[:] = now.rows.T
        actor[:] = critic[:, :ACTOR_SIZE]
        if self._noise is not None:
            actor[:, MEASURED] = observations.uniform_noise(self.np_random, actor[:, MEASURED], self._noise)

    def _finish_episodes(self, ids: Ids) -> None:
        super()._finish_episodes(ids)
        if self._ground is not None:
            self.totals[-1] += self._ground.level.sum(), self.num_envs
            command = self._now.command[:, ids]
            commanded_m = np.hypot(command[0], command[1]) * self._time_limit[ids] * CONTROL_STEP_S
            self._ground.move(self.np_random, ids, self.sims.qpos[ids, :2].T, commanded_m, self.terminated[ids])

    def _sense(self, motion: Rows, now: _Observed) -> Array:
        """Writes what n simulations (n, 37) are doing into their observations.

        Returns the bases' heights above the ground beneath them (n,) [m].
        """
        state = motion.T.astype(np.float32, order="C")
        rotation = rotation_matrix(state[3:7])
        now.angular_velocity[:] = state[22:25]
        np.negative(rotation[2], out=now.gravity)
        np.subtract(state[7:19], self._stand_column, out=now.joint_offset)
        now.joint_rate[:] = state[25:]
        now.velocity[:] = point_velocity_b(rotation, state[19:22], now.angular_velocity, self._lever)
        if self._ground is not None:
            return self._ground.sense(state[:3], rotation, now.ground)
        height: Array = state[2]
        return height

    def _push(self, pushes: Go2Pushes) -> None:
        rng = self.np_random
        ids = np.flatnonzero(randomization.is_pushed(rng, self.num_envs, CONTROL_STEP_S, pushes.interval_s))
        if ids.size:
            self.sims.qvel[ids, :3] += randomization.push_velocity(rng, ids.size, pushes.planar, pushes.vertical)


class _RandomRobots:
    """The model fields in which the robots differ."""

    def __init__(self, sims: Simulations, ranges: Go2Randomization) -> None:
        self._sims = sims
        self._ranges = ranges
        self._base = sims.model.body("base").id
        self._feet = [sims.model.geom(leg).id for leg in go2.LEGS]
        self._gain = sims.per_simulation("actuator_gainprm")
        self._bias = sims.per_simulation("actuator_biasprm")
        self._mass = sims.per_simulation("body_mass")
        self._com = sims.per_simulation("body_ipos")
        self._friction = sims.per_simulation("geom_friction")

    def draw(self, rng: np.random.Generator, ids: Ids) -> None:
        """New robots for these simulations."""
        model, ranges, n = self._sims.model, self._ranges, ids.size
        if ranges.kp is not None:
            kp = randomization.servo_gain(rng, (n, 12), ranges.kp)
            self._gain[ids, :, 0] = kp
            self._bias[ids, :, 1] = -kp
        if ranges.kd is not None:
            self._bias[ids, :, 2] = -randomization.servo_gain(rng, (n, 12), ranges.kd)
        if ranges.base_mass is not None:
            nominal = float(model.body_mass[self._base])
            self._mass[ids, self._base] = randomization.body_mass(rng, n, nominal, ranges.base_mass)
        if ranges.base_com_x is not None:
            nominal = float(model.body_ipos[self._base, 0])
            self._com[ids, self._base, 0] = randomization.body_com_x(rng, n, nominal, ranges.base_com_x)
        if ranges.friction is not None:
            friction = randomization.sliding_friction(rng, n, ranges.friction)
            self._friction[ids[:, None], self._feet, 0] = friction[:, None]
        self.derive(ids)

    def derive(self, ids: Ids) -> None:
        """What MuJoCo keeps of the masses in other fields follows the drawn ones."""
        if self._ranges.base_mass is not None or self._ranges.base_com_x is not None:
            self._sims.derive_constants(ids)


def _noise_widths(noise: Go2Noise) -> Array:
    """(30,): half width for each of the actor's entries that a sensor measures."""
    base = [noise.angular_velocity] * 3 + [noise.gravity] * 3
    return np.array([*base, *[noise.joint_position] * 12, *[noise.joint_velocity] * 12], np.float32)


def _heading(yaw: NDArray[np.float64], pitch: float) -> NDArray[np.float64]:
    """Quaternions (n, 4) w, x, y, z of a pitch in a frame that yaw (n,) has turned [rad]."""
    cos, sin = math.cos(pitch / 2), math.sin(pitch / 2)
    half = yaw[:, None] / 2
    quaternions: NDArray[np.float64] = np.cos(half) * [cos, 0, sin, 0] + np.sin(half) * [0, -sin, 0, cos]
    return quaternions
