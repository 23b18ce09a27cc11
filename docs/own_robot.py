"""A task for a robot of one's own, from its MJCF: it walks forward at a given speed. See own_robot.md."""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import mujoco
import numpy as np

from unilab_fabric.envs import rewards
from unilab_fabric.envs.batch import Simulations, rotation_matrix
from unilab_fabric.envs.vector_env import Array, Ids, Mask, TaskEnv, control_steps

CONTROL_STEP_S, SUBSTEPS, JOINTS = 0.02, 4, 8
STAND, HEIGHT = np.tile([0.5, -1.0], 4), 0.29  # rad: hip, knee of each leg; m


@dataclass(frozen=True, kw_only=True)
class CrawlerRewards:
    """Weight per second of each reward term."""

    tracking_speed: float = 2.0
    """exp(-error^2 / 0.1) of the planar velocity's distance from straight ahead at that speed [m/s]."""
    turning: float = -0.2
    """Squared angular velocity [rad^2/s^2]."""
    action_rate: float = -0.02
    """Squared change of the action from step to step."""


class Crawler(TaskEnv):
    """A box on four legs walks forward: 8 position targets, 50 Hz."""

    def __init__(
        self,
        num_envs: int,
        *,
        speed: float = 0.5,
        episode_s: float = 10.0,
        action_scale: float = 0.5,
        rewards: CrawlerRewards = CrawlerRewards(),
        num_threads: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__(
            num_envs=num_envs,
            actor_size=6 + 3 * JOINTS,  # angular velocity, gravity, joints, rates, last action
            critic_size=9 + 3 * JOINTS,  # and the trunk's velocity, which a real robot does not measure
            action_low=[-1.0] * JOINTS,
            action_high=[1.0] * JOINTS,
            episode_steps=control_steps(episode_s, CONTROL_STEP_S),
            reward_terms=dataclasses.asdict(rewards),
            reward_factor=CONTROL_STEP_S,
            figures=("speed",),
            falls=True,
            seed=seed,
        )
        model = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("own_robot.xml")))
        self.sims = Simulations(model, num_envs, substeps=SUBSTEPS, num_threads=num_threads)
        self._term = dict(zip(dataclasses.asdict(rewards), self.terms, strict=True))
        self._speed, self._action_scale = speed, action_scale
        self._action, self._change = np.zeros((2, JOINTS, num_envs), np.float32)
        self.mutable.update({"action": self._action, **self.sims.mutable})  # saved and resumed with the run

    def _begin(self, ids: Ids) -> None:
        motion = np.zeros((ids.size, self.sims.motion.shape[1]))
        motion[:, 2], motion[:, 3] = HEIGHT, 1.0
        motion[:, 7 : 7 + JOINTS] = STAND + self.np_random.uniform(-0.1, 0.1, (ids.size, JOINTS))
        self.sims.place(ids, motion)
        self._action[:, ids] = 0.0

    def _simulate(self, action: Array) -> Mask | None:
        np.subtract(action.T, self._action, out=self._change)
        self._action[:] = action.T
        self.sims.ctrl[:] = STAND + self._action_scale * action
        return self.sims.step()

    def _evaluate(self) -> None:
        spin, gravity, velocity = self._trunk(self.sims.motion)
        off = (velocity[0] - self._speed) ** 2 + velocity[1] ** 2
        rewards.bell(off, 0.1, out=self._term["tracking_speed"])
        rewards.sum_of_squares(spin, out=self._term["turning"])
        rewards.action_rate(self._change, out=self._term["action_rate"])
        self.figures[0] = velocity[0]
        np.greater(gravity[2], -math.cos(math.radians(60)), out=self.terminated)

    def _observe(self, ids: Ids | slice, actor: Array, critic: Array) -> None:
        motion = self.sims.motion[ids]
        spin, gravity, velocity = self._trunk(motion)
        joints, rates = motion[:, 7 : 7 + JOINTS] - STAND, motion[:, -JOINTS:]
        critic[:] = np.hstack([spin.T, gravity.T, joints, rates, self._action[:, ids].T, velocity.T])
        actor[:] = critic[:, : actor.shape[1]]

    def _trunk(self, motion: Array) -> tuple[Array, Array, Array]:
        """Angular velocity, gravity and velocity of n trunks in their own frames, (3, n) each."""
        state = motion.T.astype(np.float32)
        rotation, start = rotation_matrix(state[3:7]), 7 + JOINTS
        velocity = np.add.reduce(state[start : start + 3][:, None] * rotation, axis=0)
        return state[start + 3 : start + 6], -rotation[2], velocity
