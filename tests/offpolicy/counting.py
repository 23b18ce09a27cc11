"""An environment whose every number says what it is: an observation is the steps since the episode began."""

import time
from typing import ClassVar

import numpy as np
from gymnasium.spaces import Box, Dict
from gymnasium.vector import AutoresetMode, VectorEnv


class CountingEnv(VectorEnv):
    """Observation: steps since reset (entry 0) and the environment's number (entry 1); reward: the step reached.

    Episodes last `episode_length` steps in environment 0, one more in each next one, and end by time limit in even
    environments, by failure in odd ones.
    """

    metadata: ClassVar = {"autoreset_mode": AutoresetMode.SAME_STEP}

    def __init__(
        self, num_envs: int = 3, episode_length: int = 3, slow_s: float = 0.0, fail_at: int = -1, first_env: int = 0
    ):
        self.num_envs = num_envs
        self._first_env = first_env
        one = Box(-np.inf, np.inf, (2,), np.float32)
        many = Box(-np.inf, np.inf, (num_envs, 2), np.float32)
        self.single_observation_space = Dict({"actor": one, "critic": one})
        self.observation_space = Dict({"actor": many, "critic": many})
        self.single_action_space = Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = Box(-1.0, 1.0, (num_envs, 1), np.float32)
        self._length = episode_length + np.arange(num_envs)
        self._steps = np.zeros(num_envs)
        self._slow_s = slow_s
        self._slow = np.random.default_rng()  # unseeded on purpose: only time depends on it
        self._fail_at = fail_at
        self._calls = 0

    def _observe(self):
        rows = np.stack([self._steps, self._first_env + np.arange(self.num_envs)], axis=1).astype(np.float32)
        return {"actor": rows, "critic": rows.copy()}

    def reset(self, *, seed=None, options=None):
        self._steps[:] = 0
        return self._observe(), {}

    def step(self, actions):
        self._calls += 1
        if self._calls == self._fail_at:
            raise RuntimeError("the counting environment was told to fail here")
        if self._slow_s:
            time.sleep(self._slow.uniform(0, self._slow_s))
        self._steps += 1
        reward = self._steps.astype(np.float32)
        ended = self._steps >= self._length
        odd = np.arange(self.num_envs) % 2 == 1
        infos = {}
        if ended.any():
            last = self._observe()
            final = np.full(self.num_envs, None, dtype=object)
            for env in np.flatnonzero(ended):
                final[env] = {name: rows[env] for name, rows in last.items()}
            infos = {"final_obs": final, "_final_obs": ended.copy()}
        self._steps[ended] = 0
        return self._observe(), reward, ended & odd, ended & ~odd, infos
