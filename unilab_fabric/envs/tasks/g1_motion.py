"""G1 follows a reference motion: joints, and fourteen bodies where the robot stands.

Control step 0.02 s, one frame of the motion in each. Actor observation (160): the reference's joint angles and rates,
position and orientation of the reference's torso in the robot's torso, velocity at the pelvis's inertial unit, angular
velocity of the torso, joint angles from the stand pose, joint rates, last action. The critic (289) has it without
noise, and in the torso's frame positions and orientations of the fourteen bodies, and the velocity once more. Actions
(29): joint targets as offsets from the stand pose.

A step is judged against the frame that the policy saw before it, moved to where the robot's torso was then; the
observation after it shows the next frame. Poses and velocities of bodies are those before the last physics step
(1/150 s old), joints and what derives from them are current.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from unilab_fabric.envs import observations, quaternions, randomization, rewards
from unilab_fabric.envs.batch import Simulations, lever_matrix, point_velocity_b, rotation_matrix
from unilab_fabric.envs.clips import clip_path
from unilab_fabric.envs.commands import Range, check_range
from unilab_fabric.envs.motions import load_motion, problems
from unilab_fabric.envs.robots import g1
from unilab_fabric.envs.robots.model import Physics
from unilab_fabric.envs.sampling import FrameSampler, Sampling
from unilab_fabric.envs.tasks.g1_walk import JOINTS, torso_motion
from unilab_fabric.envs.vector_env import Array, Ids, Mask, TaskEnv, control_steps
from unilab_fabric.errors import UserError

_LEG = ("hip_roll_link", "knee_link", "ankle_roll_link")
_ARM = ("shoulder_roll_link", "elbow_link", "wrist_yaw_link")
BODIES = (
    "pelvis",
    *(f"{side}_{part}" for side in g1.SIDES for part in _LEG),
    "torso_link",
    *(f"{side}_{part}" for side in g1.SIDES for part in _ARM),
)
"""The bodies that follow the reference."""
ANCHOR = BODIES.index("torso_link")
ENDS = [BODIES.index(f"{side}_{part}") for part in ("ankle_roll_link", "wrist_yaw_link") for side in g1.SIDES]
LOW_BODIES = [i for i, name in enumerate(BODIES) if not name.endswith(("ankle_roll_link", "wrist_yaw_link"))]
"""Bodies that should not come near the floor."""
LOW = 0.05  # m

ACTOR_SIZE = 160
CRITIC_SIZE = ACTOR_SIZE + 9 * len(BODIES) + 3
_MEASURED = slice(67, 131)
_JOINT_ANGLES = slice(73, 102)


@dataclass(frozen=True, kw_only=True)
class TrackingRewards:
    """Weight per second of each reward term; a term with weight 0 is reported all the same."""

    anchor_pos: float = 1.0
    """exp(-error^2 / 0.3^2) of the torso's position [m]."""
    anchor_ori: float = 0.5
    """exp(-error^2 / 0.4^2) of the torso's orientation [rad]."""
    body_pos: float = 2.0
    """exp(-mean error^2 / 0.3^2) of the bodies' positions, moved to where the robot is [m]."""
    body_ori: float = 1.0
    """exp(-mean error^2 / 0.4^2) of their orientations [rad]."""
    body_lin_vel: float = 1.0
    """exp(-mean error^2) of their velocities [m/s]."""
    body_ang_vel: float = 1.0
    """exp(-mean error^2 / 3.14^2) of their angular velocities [rad/s]."""
    action_rate: float = -0.1
    """Squared change of the action from step to step."""
    joint_limit: float = -2.0
    """Squared distance of the joints beyond their ranges [rad^2]."""
    low_bodies: float = -0.1
    """Bodies other than ankles and wrists that are lower than 0.05 m."""


@dataclass(frozen=True, kw_only=True)
class TrackingNoise:
    """Half widths of the uniform noise on what the actor observes."""

    velocity: float = 0.1
    """[m/s]"""
    angular_velocity: float = 0.2
    """[rad/s]"""
    joint_position: float = 0.01
    """[rad]"""
    joint_velocity: float = 1.5
    """[rad/s]"""


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Errors at which an episode fails; only heights are compared, so drift over the floor ends none."""

    anchor_height: float = 0.5
    """Of the torso [m]."""
    anchor_tilt: float = 0.8
    """Of the vertical component of gravity in the torso."""
    end_height: float = 0.5
    """Of any ankle or wrist [m]."""


@dataclass(frozen=True, kw_only=True)
class TrackingRandomization:
    """What differs between robots, drawn at every reset; null leaves a quantity alone."""

    torso_com: tuple[float, float, float] | None = (0.025, 0.05, 0.05)
    """Greatest shift of the torso's centre of mass, either way along x, y and z of the torso [m]."""
    encoder_bias: Range | None = (-0.01, 0.01)
    """Error of each joint's encoder [rad]: the actor sees its angle with it, and the servo aims as much too low."""
    friction: Range | None = (0.3, 1.2)
    """Sliding friction of the soles. The faithful physics' capsules along them slide no easier than the floor's 1."""

    def __post_init__(self) -> None:
        if self.torso_com is not None and not (len(self.torso_com) == 3 and all(0 <= s < 1 for s in self.torso_com)):
            told = "allowed: three numbers from 0 to less than 1 m"
            raise UserError("task.randomization.torso_com", list(self.torso_com), told)
        for name in ("encoder_bias", "friction"):
            if getattr(self, name) is not None:
                check_range(f"task.randomization.{name}", getattr(self, name))
        if self.friction is not None and self.friction[0] < 0:
            raise UserError("task.randomization.friction", list(self.friction), "allowed: 0 or more")


@dataclass(frozen=True, kw_only=True)
class TrackingPushes:
    """Sudden changes of the pelvis's velocity, world frame, each environment by itself."""

    interval_s: float = 2.0
    """Mean time between two pushes of an environment [s]."""
    planar: float = 0.5
    """Greatest change along x and along y [m/s]."""
    vertical: float = 0.2
    """Greatest change along z [m/s]."""
    tilting: float = 0.52
    """Greatest change of the rates about x and about y [rad/s]."""
    turning: float = 0.78
    """Greatest change of the rate about z [rad/s]."""

    def __post_init__(self) -> None:
        if not self.interval_s >= g1.CONTROL_STEP_S:
            raise UserError("task.pushes.interval_s", self.interval_s, f"allowed: {g1.CONTROL_STEP_S} s or more")
        for name in ("planar", "vertical", "tilting", "turning"):
            if not getattr(self, name) >= 0:
                raise UserError(f"task.pushes.{name}", getattr(self, name), "allowed: 0 or more")


class _Reference:
    """One or more clips, one behind the other: frames (T, ...) of joints and of the fourteen bodies."""

    def __init__(self, names: tuple[str, ...], model: mujoco.MjModel) -> None:
        motions = []
        for name in names:
            motion = load_motion(clip_path(name), model)
            if abs(motion.fps * g1.CONTROL_STEP_S - 1) > 1e-6:
                told = f"it has {motion.fps:g} frames a second; allowed: 50, one in each control step"
                raise UserError("task.motion", name, told)
            wrong = problems(motion, model, limit=1)
            if wrong:
                raise UserError("task.motion", name, f"{wrong[0]}; `motion check` tells all")
            motions.append(motion)
        picked = [motions[0].body_names.index(body) for body in BODIES]

        def joined(array: str, columns: Any = slice(None)) -> Array:
            return np.concatenate([getattr(motion, array)[:, columns] for motion in motions]).astype(np.float32)

        self.joint_pos, self.joint_vel = joined("joint_pos"), joined("joint_vel")
        self.pos, self.quat = joined("body_pos_w", picked), joined("body_quat_w", picked)
        self.lin_vel, self.ang_vel = joined("body_lin_vel_w", picked), joined("body_ang_vel_w", picked)
        ends = np.cumsum([motion.frames for motion in motions])
        self.last = np.repeat(ends - 1, [motion.frames for motion in motions])
        """(T,): the last frame of the clip that a frame belongs to."""


class G1MotionTracking(TaskEnv):
    """G1 follows a reference motion: 29 position targets, 50 Hz."""

    def __init__(
        self,
        num_envs: int,
        *,
        motion: tuple[str, ...] = ("squat_and_step",),
        physics: Physics = "fast",
        episode_s: float = 10.0,
        action_scale: float = 2.0,
        rewards: TrackingRewards = TrackingRewards(),
        reward_scale: float = 1.0,
        thresholds: Thresholds = Thresholds(),
        sampling: Sampling = Sampling(),  # noqa: B008  frozen
        noise: TrackingNoise | None = None,
        pushes: TrackingPushes | None = None,
        randomization: TrackingRandomization | None = None,
        stagger: bool = False,
        mjcf: str | None = None,
        num_threads: int = 0,
        seed: int = 0,
    ) -> None:
        """Makes the environments.

        Args:
            num_envs: Environments per rank.
            motion: Clips to follow: names of shipped ones, or npz files (docs/motions.md); several follow each other.
            physics: Solver settings: fast for training, faithful for judging.
            episode_s: Time limit of an episode [s]; the end of a clip ends it too, as a time limit does.
            action_scale: Joint offset at action 1 [rad].
            rewards: Weight per second of each reward term.
            reward_scale: Factor on the whole reward, so that returns fit the critic's range.
            thresholds: Errors at which an episode fails.
            sampling: Where in the motion episodes begin.
            noise: Noise on the actor's observation; null for none.
            pushes: Sudden changes of the pelvis's velocity; null for none.
            randomization: Differences between robots; null for none.
            stagger: End the first episodes after a random part of the time limit, so that time-outs do not coincide.
            mjcf: MJCF file in place of the shipped robot and floor, with the same joints, actuators, sensors and feet.
            num_threads: Physics threads, 0 for all allowed cores.
            seed: Seed of resets, noise, pushes and randomisation.
        """
        for name, value in [("action_scale", action_scale), ("reward_scale", reward_scale)]:
            if not value > 0:
                raise UserError(f"task.{name}", value, "allowed: more than 0")
        if not motion:
            raise UserError("task.motion", "empty", "allowed: one clip or more")
        super().__init__(
            num_envs=num_envs,
            actor_size=ACTOR_SIZE,
            critic_size=CRITIC_SIZE,
            action_low=[-1.0] * JOINTS,
            action_high=[1.0] * JOINTS,
            episode_steps=control_steps(episode_s, g1.CONTROL_STEP_S),
            reward_terms=dataclasses.asdict(rewards),
            reward_factor=g1.CONTROL_STEP_S * reward_scale,
            figures=("anchor_error", "body_error", "joint_error", "sampling_entropy"),
            falls=True,
            stagger=stagger,
            seed=seed,
        )
        model = g1.load(physics, mjcf)
        self.sims = Simulations(model, num_envs, substeps=g1.PHYSICS[physics].substeps, num_threads=num_threads)
        self.reference = _Reference(motion, model)
        self.sampling = FrameSampler(sampling, self.reference.last, g1.CONTROL_STEP_S)
        self._pushes = pushes
        self._robots = None if randomization is None else _RandomRobots(self.sims, randomization)
        self._ids = [model.body(name).id for name in BODIES]
        self._fields = [self.sims.derived(name) for name in ("xpos", "xquat", "cvel", "subtree_com")]
        self._scratch = mujoco.MjData(model)
        self._ranges = np.array([model.joint(name).range for name in g1.JOINTS], np.float32)
        self._action_scale, self._thresholds = action_scale, thresholds
        self._noise = None if noise is None else _noise_widths(noise)
        self._term = dict(zip(dataclasses.asdict(rewards), self.terms, strict=True))
        self._stand = np.array(g1.STAND_JOINTS)
        self._lever = lever_matrix(g1.IMU_PELVIS)
        bodies = len(BODIES)
        self.frame = np.zeros(num_envs, np.int64)
        """(N,): the frame of the reference that the observation shows."""
        self.pos, self.target_pos = np.zeros((2, num_envs, bodies, 3), np.float32)
        self.quat, self.target_quat = np.zeros((2, num_envs, bodies, 4), np.float32)
        self.lin_vel, self.ang_vel = np.zeros((2, num_envs, bodies, 3), np.float32)
        self._action, self._change = np.zeros((2, num_envs, JOINTS), np.float32)
        names = ("frame", "pos", "quat", "lin_vel", "ang_vel", "target_pos", "target_quat")
        own: dict[str, NDArray[Any]] = {name: getattr(self, name) for name in names}
        self.mutable.update({**own, "action": self._action, "failures": self.sampling.failures, **self.sims.mutable})
        if self._robots is not None:
            self.mutable["encoder_bias"] = self._robots.encoder_bias

    def set_state(self, state: dict[str, NDArray[Any]]) -> None:
        """As in the base; what MuJoCo derives from a robot's masses is derived again."""
        super().set_state(state)
        if self._robots is not None:
            self._robots.derive(np.arange(self.num_envs))

    # ---- the parts of a step ----------------------------------------------------------------------------------------

    def _begin(self, ids: Ids) -> None:
        """The robot stands in a frame of the reference, a little off."""
        rng, n, reference = self.np_random, ids.size, self.reference
        frame = self.sampling.draw(rng, n)
        self.frame[ids] = frame
        motion = np.zeros((n, 71))
        motion[:, :3] = reference.pos[frame, 0] + rng.uniform(-1, 1, (n, 3)) * [0.05, 0.05, 0.01]
        lean = quaternions.of_roll_pitch_yaw(rng.uniform(-1, 1, (n, 3)) * [0.1, 0.1, 0.2])
        turn = quaternions.multiply(lean, reference.quat[frame, 0].astype(np.float64))
        motion[:, 3:7] = turn
        joints = reference.joint_pos[frame] + rng.uniform(-0.1, 0.1, (n, JOINTS))
        motion[:, 7:36] = np.clip(joints, self._ranges[:, 0], self._ranges[:, 1])
        motion[:, 36:39] = reference.lin_vel[frame, 0] + rng.uniform(-1, 1, (n, 3)) * [0.5, 0.5, 0.2]
        spin_w = reference.ang_vel[frame, 0] + rng.uniform(-1, 1, (n, 3)) * [0.52, 0.52, 0.78]
        motion[:, 39:42] = quaternions.rotate(quaternions.conjugate(turn), spin_w)  # a free joint's is in its own frame
        motion[:, 42:71] = reference.joint_vel[frame]
        self.sims.place(ids, motion)
        if self._robots is not None:
            self._robots.draw(rng, ids)
        self._action[ids] = 0.0
        for row, env in zip(motion, ids.tolist(), strict=True):
            self._derive(env, row)
        self._aim(ids)

    def _simulate(self, action: Array) -> Mask | None:
        np.subtract(action, self._action, out=self._change)
        self._action[:] = action
        self.sims.ctrl[:] = action * self._action_scale + self._stand
        if self._robots is not None:
            self.sims.ctrl[:] -= self._robots.encoder_bias
        if self._pushes is not None:
            self._push(self._pushes)
        diverged = self.sims.step()
        self._sense_bodies()
        return diverged

    def _evaluate(self) -> None:
        reference, frame, term = self.reference, self.frame, self._term
        pos, quat = reference.pos[frame], reference.quat[frame]
        joints = self.sims.qpos[:, 7:].astype(np.float32)
        anchor_off = np.sum((pos[:, ANCHOR] - self.pos[:, ANCHOR]) ** 2, axis=1)
        body_off = np.sum((self.target_pos - self.pos) ** 2, axis=2)
        rewards.bell(anchor_off, 0.3**2, out=term["anchor_pos"])
        turned = quaternions.angle(quat[:, ANCHOR], self.quat[:, ANCHOR])
        rewards.bell(turned**2, 0.4**2, out=term["anchor_ori"])
        rewards.bell(body_off.mean(1), 0.3**2, out=term["body_pos"])
        turned = quaternions.angle(self.target_quat, self.quat)
        rewards.bell((turned**2).mean(1), 0.4**2, out=term["body_ori"])
        off = np.sum((reference.lin_vel[frame] - self.lin_vel) ** 2, axis=2).mean(1)
        rewards.bell(off, 1.0, out=term["body_lin_vel"])
        off = np.sum((reference.ang_vel[frame] - self.ang_vel) ** 2, axis=2).mean(1)
        rewards.bell(off, 3.14**2, out=term["body_ang_vel"])
        rewards.action_rate(self._change.T, out=term["action_rate"])
        beyond = np.maximum(self._ranges[:, 0] - joints, 0) + np.maximum(joints - self._ranges[:, 1], 0)
        rewards.sum_of_squares(beyond.T, out=term["joint_limit"])
        np.sum(self.pos[:, LOW_BODIES, 2] < LOW, axis=1, out=term["low_bodies"])

        np.sqrt(anchor_off, out=self.figures[0])
        np.mean(np.sqrt(body_off), axis=1, out=self.figures[1])
        np.mean(np.abs(reference.joint_pos[frame] - joints), axis=1, out=self.figures[2])
        self.figures[3] = _entropy(self.sampling.probabilities())
        self._fail(pos, quat)
        self.truncated |= frame >= reference.last[frame]
        self.frame += ~self.truncated  # the frame that is shown next
        np.minimum(self.frame, reference.last[frame], out=self.frame)
        self._aim(np.arange(self.num_envs))

    def _fail(self, pos: Array, quat: Array) -> None:
        limits = self._thresholds
        down = np.array([0, 0, -1], np.float32)
        gravity = [quaternions.rotate(quaternions.conjugate(q[:, ANCHOR]), down)[:, 2] for q in (quat, self.quat)]
        np.greater(np.abs(pos[:, ANCHOR, 2] - self.pos[:, ANCHOR, 2]), limits.anchor_height, out=self.terminated)
        self.terminated |= np.abs(gravity[0] - gravity[1]) > limits.anchor_tilt
        ends = np.abs(self.target_pos[:, ENDS, 2] - self.pos[:, ENDS, 2])
        self.terminated |= (ends > limits.end_height).any(1)

    def _finish_episodes(self, ids: Ids) -> None:
        self.sampling.note(self.frame[ids[self.terminated[ids]]])
        super()._finish_episodes(ids)

    def _observe(self, ids: Ids | slice, actor: Array, critic: Array) -> None:
        reference, frame = self.reference, self.frame[ids]
        motion = self.sims.motion[ids]
        velocity, spin = self._velocities(motion.T.astype(np.float32))
        here, back = self.pos[ids][:, ANCHOR], quaternions.conjugate(self.quat[ids][:, ANCHOR])
        bodies = quaternions.rotate(back[:, None], self.pos[ids] - here[:, None])
        turns = quaternions.two_columns(
            quaternions.multiply(np.broadcast_to(back[:, None], self.quat[ids].shape), self.quat[ids])
        )
        n = len(motion)
        critic[:] = np.concatenate(
            [
                reference.joint_pos[frame],
                reference.joint_vel[frame],
                quaternions.rotate(back, reference.pos[frame, ANCHOR] - here),
                quaternions.two_columns(quaternions.multiply(back, reference.quat[frame, ANCHOR])),
                velocity.T,
                spin.T,
                motion[:, 7:36] - self._stand,
                motion[:, 42:71],
                self._action[ids],
                bodies.reshape(n, -1),
                turns.reshape(n, -1),
                velocity.T,
            ],
            axis=1,
        )
        actor[:] = critic[:, :ACTOR_SIZE]
        if self._robots is not None:
            actor[:, _JOINT_ANGLES] += self._robots.encoder_bias[ids]
        if self._noise is not None:
            actor[:, _MEASURED] = observations.uniform_noise(self.np_random, actor[:, _MEASURED], self._noise)

    def _push(self, pushes: TrackingPushes) -> None:
        rng = self.np_random
        ids = np.flatnonzero(randomization.is_pushed(rng, self.num_envs, g1.CONTROL_STEP_S, pushes.interval_s))
        if ids.size:
            self.sims.qvel[ids, :3] += randomization.push_velocity(rng, ids.size, pushes.planar, pushes.vertical)
            spin_w = randomization.push_velocity(rng, ids.size, pushes.tilting, pushes.turning)
            upright = quaternions.conjugate(self.sims.qpos[ids, 3:7])
            self.sims.qvel[ids, 3:6] += quaternions.rotate(upright, spin_w)  # a free joint's is in its own frame

    # ---- what they are made of --------------------------------------------------------------------------------------

    def _aim(self, ids: Ids) -> None:
        """Moves the reference's bodies to where the robot is: turned about the vertical, heights kept."""
        reference, frame = self.reference, self.frame[ids]
        pos, quat = reference.pos[frame], reference.quat[frame]
        off = quaternions.multiply(self.quat[ids][:, ANCHOR], quaternions.conjugate(quat[:, ANCHOR]))
        turn = np.broadcast_to(quaternions.heading(off)[:, None], quat.shape)
        moved = quaternions.rotate(turn, pos - pos[:, ANCHOR, None]) + self.pos[ids][:, ANCHOR, None]
        moved[:, :, 2] = pos[:, :, 2]
        self.target_pos[ids], self.target_quat[ids] = moved, quaternions.multiply(turn, quat)

    def _sense_bodies(self) -> None:
        """Poses and velocities of the bodies' frame origins, from what MuJoCo derived in the step."""
        xpos, xquat, cvel = (field[:, self._ids] for field in self._fields[:3])
        root_com = self._fields[3][:, 1:2]  # velocities are about the centre of mass of the whole tree
        self.pos[:], self.quat[:] = xpos, xquat
        self.ang_vel[:] = cvel[:, :, :3]
        self.lin_vel[:] = cvel[:, :, 3:] + np.cross(cvel[:, :, :3], xpos - root_com)

    def _derive(self, env: int, motion: NDArray[np.float64]) -> None:
        """The same for one environment that has been placed and not stepped yet."""
        model, data = self.sims.model, self._scratch
        data.qpos[:], data.qvel[:] = motion[:36], motion[36:]
        mujoco.mj_fwdPosition(model, data)
        mujoco.mj_fwdVelocity(model, data)
        self.pos[env], self.quat[env] = data.xpos[self._ids], data.xquat[self._ids]
        spin = data.cvel[self._ids, :3]
        self.ang_vel[env] = spin
        self.lin_vel[env] = data.cvel[self._ids, 3:] + np.cross(spin, data.xpos[self._ids] - data.subtree_com[1])

    def _velocities(self, state: Array) -> tuple[Array, Array]:
        """Velocity at the pelvis's inertial unit and angular velocity of the torso, in their own frames (3, n)."""
        pelvis, turning = rotation_matrix(state[3:7]), state[39:42]
        first = 7 + g1.FIRST_WAIST
        rates = 42 + g1.FIRST_WAIST
        _, spin = torso_motion(pelvis[2], turning, state[first : first + 3], state[rates : rates + 3])
        return point_velocity_b(pelvis, state[36:39], turning, self._lever), spin


class _RandomRobots:
    """In what the robots differ."""

    encoder_bias: Array
    """(N, 29) [rad]"""

    def __init__(self, sims: Simulations, ranges: TrackingRandomization) -> None:
        model = sims.model
        self._sims = sims
        self._ranges = ranges
        self._torso = model.body("torso_link").id
        self._soles = [i for i in range(model.ngeom) if "_foot" in model.geom(i).name]
        self._com = sims.per_simulation("body_ipos")
        self._friction = sims.per_simulation("geom_friction")
        self.encoder_bias = np.zeros((len(self._com), JOINTS), np.float32)

    def draw(self, rng: np.random.Generator, ids: Ids) -> None:
        """New robots for these simulations."""
        ranges, n = self._ranges, ids.size
        if ranges.torso_com is not None:
            shift = rng.uniform(-1, 1, (n, 3)) * ranges.torso_com
            self._com[ids, self._torso] = self._sims.model.body_ipos[self._torso] + shift
        if ranges.encoder_bias is not None:
            self.encoder_bias[ids] = rng.uniform(*ranges.encoder_bias, (n, JOINTS))
        if ranges.friction is not None:
            friction = randomization.sliding_friction(rng, n, ranges.friction)
            self._friction[ids[:, None], self._soles, 0] = friction[:, None]
        self.derive(ids)

    def derive(self, ids: Ids) -> None:
        """What MuJoCo keeps of the centre of mass in other fields follows the drawn one."""
        if self._ranges.torso_com is not None:
            self._sims.derive_constants(ids)


def _entropy(probabilities: NDArray[np.float64]) -> float:
    """1 where all are alike, 0 where one has everything."""
    if len(probabilities) < 2:
        return 1.0
    return float(-(probabilities * np.log(probabilities)).sum() / np.log(len(probabilities)))


def _noise_widths(noise: TrackingNoise) -> Array:
    """(64,): half width for each of the actor's entries that a sensor measures."""
    base = [noise.velocity] * 3 + [noise.angular_velocity] * 3
    return np.array([*base, *[noise.joint_position] * JOINTS, *[noise.joint_velocity] * JOINTS], np.float32)
