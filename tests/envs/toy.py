"""A task of ours whose every number says what it is, and that can be told to misbehave."""

import numpy as np

from unilab_fabric.envs.vector_env import TaskEnv


class ToyTask(TaskEnv):
    """Actor: steps since reset, environment; critic: the same and 10 * the action.

    Two reward terms: `steps` (the step reached) with weight 2 per second, `one` (1) with weight -3; reward factor 0.5.
    Figure `environment` is the environment's number. Whoever takes action 0.25 fails.
    """

    def __init__(self, num_envs: int, *, limit: int = 4, stagger: bool = False, num_threads: int = 0, seed: int = 0):
        super().__init__(
            num_envs=num_envs,
            actor_size=2,
            critic_size=3,
            action_low=[-1.0],
            action_high=[1.0],
            episode_steps=limit,
            reward_terms={"steps": 2.0, "one": -3.0},
            reward_factor=0.5,
            figures=("environment",),
            falls=True,
            stagger=stagger,
            seed=seed,
        )
        self.steps = np.zeros(num_envs)
        self.action = np.zeros(num_envs)
        self.drawn = np.zeros(num_envs)
        self.mutable.update({"steps": self.steps, "drawn": self.drawn})
        self.diverges: set[int] = set()
        self.bad_term: dict[int, float] = {}
        self.bad_actor: dict[int, float] = {}
        self.bad_critic: dict[int, float] = {}
        self.bad_start: dict[int, float] = {}

    def _begin(self, ids):
        self.steps[ids] = 0
        self.drawn[ids] = self.np_random.random(ids.size)

    def _simulate(self, action):
        assert np.isfinite(action).all()
        self.action = action[:, 0].copy()
        self.steps += 1
        if not self.diverges:
            return None
        return np.isin(np.arange(self.num_envs), list(self.diverges))

    def _evaluate(self):
        self.terms[0] = self.steps
        self.terms[1] = 1
        for env, value in self.bad_term.items():
            self.terms[1, env] = value
        self.figures[0] = np.arange(self.num_envs)
        self.terminated[:] = self.action == 0.25

    def _observe(self, ids, actor, critic):
        numbers = np.arange(self.num_envs)[ids]
        actor[:] = np.stack([self.steps[ids], numbers], axis=1)
        critic[:] = np.stack([self.steps[ids], numbers, 10 * self.action[ids]], axis=1)
        if isinstance(ids, slice):
            for env, value in self.bad_actor.items():
                actor[env, 0] = value
            for env, value in self.bad_critic.items():
                critic[env, 2] = value
        else:
            for env, value in self.bad_start.items():
                actor[ids == env, 0] = value
