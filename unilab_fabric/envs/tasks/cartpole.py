"""Swing a pole up by pushing the cart it hangs from: a small task for tests and a first look.

Observation, actor and critic alike: cart position [m] and velocity [m/s], sine and cosine of the pole's angle, its rate
[rad/s]. Action: force on the cart, 10 N at 1. Nothing ends an episode but the time limit.
"""

from pathlib import Path

import mujoco
import numpy as np

from unilab_fabric.envs.batch import Simulations
from unilab_fabric.envs.vector_env import Array, Floats, Ids, Mask, TaskEnv, control_steps

CONTROL_STEP_S = 0.04
SUBSTEPS = 4
UPRIGHT_COSINE = 0.95
"""A pole within 18 degrees of upright counts as up."""

# Per second. The step's reward is at most 5 * 0.04 = 0.2, so the return discounted at 0.98 stays within [0, 10].
REWARDS = {"pole_up": 3.0, "balance": 2.0}


def pole_up(cosine: Floats) -> Floats:
    """Height of the pole's tip over its lowest point, 0 to 1; cosine (n,) of the angle from upright."""
    return (1 + cosine) / 2


def balance(cosine: Floats, pole_rate: Floats, cart_position: Floats) -> Floats:
    """1 for an upright pole at rest over the middle of the rail; (n,) each, rate [rad/s], position [m]."""
    return np.exp(-8 * (1 - cosine) - 0.1 * pole_rate**2 - cart_position**2)


class CartpoleSwingup(TaskEnv):
    """Swing up a pole on a cart; solved in seconds on two CPU cores."""

    def __init__(
        self,
        num_envs: int,
        *,
        episode_s: float = 10.0,
        stagger: bool = False,
        num_threads: int = 0,
        seed: int = 0,
    ) -> None:
        """Makes the environments.

        Args:
            num_envs: Environments per rank.
            episode_s: Time limit of an episode [s].
            stagger: End the first episodes after a random part of the time limit, so that time-outs do not coincide.
            num_threads: Physics threads, 0 for all allowed cores.
            seed: Seed of the initial states.
        """
        super().__init__(
            num_envs=num_envs,
            actor_size=5,
            critic_size=5,
            action_low=[-1.0],
            action_high=[1.0],
            episode_steps=control_steps(episode_s, CONTROL_STEP_S),
            reward_terms=REWARDS,
            reward_factor=CONTROL_STEP_S,
            figures=("upright",),
            stagger=stagger,
            seed=seed,
        )
        model = mujoco.MjModel.from_xml_path(str(Path(__file__).with_name("cartpole.xml")))
        self.sims = Simulations(model, num_envs, substeps=SUBSTEPS, num_threads=num_threads)
        self.mutable.update(self.sims.mutable)

    def _begin(self, ids: Ids) -> None:
        """The pole hangs, nearly at rest, and the cart is near the middle."""
        rng = self.np_random
        reach = np.array([0.3, 0.3, 0.05, 0.05])
        self.sims.place(ids, np.array([0, np.pi, 0, 0]) + rng.uniform(-reach, reach, (ids.size, 4)))

    def _simulate(self, action: Array) -> Mask | None:
        self.sims.ctrl[:] = action
        return self.sims.step()

    def _evaluate(self) -> None:
        cart, pole, _, pole_rate = self.sims.motion.T
        cosine = np.cos(pole)
        self.terms[0] = pole_up(cosine)
        self.terms[1] = balance(cosine, pole_rate, cart)
        self.figures[0] = cosine > UPRIGHT_COSINE
        self.terminated[:] = False

    def _observe(self, ids: Ids | slice, actor: Array, critic: Array) -> None:
        cart, pole, cart_rate, pole_rate = self.sims.motion[ids].T
        np.stack([cart, cart_rate, np.sin(pole), np.cos(pole), pole_rate], axis=1, out=critic, casting="same_kind")
        actor[:] = critic
