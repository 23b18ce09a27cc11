"""Tasks of others: any Gymnasium environment with Box observations and actions, as a `TaskEnv`."""

import difflib
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv, VectorEnv
from numpy.typing import NDArray

from unilab_fabric.envs.vector_env import Array, Ids, Mask, StateUnavailable, TaskEnv
from unilab_fabric.errors import UserError

Observation = dict[str, Array]


class AdaptedTask(TaskEnv):
    """A vector environment of another maker.

    Observations are one Box, flattened and given to actor and critic alike, or a Dict with the Boxes `actor` and
    `critic`. Actions are one Box with finite bounds; the policy acts in [-1, 1] and is rescaled to them. Time limits
    are the environment's own `truncated`.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], *, name: str, seed: int = 0) -> None:
        """Checks the spaces and takes the environment over.

        Args:
            env: The environment, in same-step autoreset mode.
            name: How errors and `task_spec` call it.
            seed: Seed of its first reset.

        Raises UserError where the environment is not what the class describes.
        """
        mode = env.metadata.get("autoreset_mode")
        if mode is not AutoresetMode.SAME_STEP:
            raise UserError("task", name, f"allowed: same-step autoreset (AutoresetMode.SAME_STEP); it has {mode}")
        self._groups = _observation_groups(env.single_observation_space, name)
        self._box = _action_box(env.single_action_space, name)
        actions = int(np.prod(self._box.shape))
        super().__init__(
            num_envs=env.num_envs,
            actor_size=int(np.prod(self._groups["actor"].shape)),
            critic_size=int(np.prod(self._groups["critic"].shape)),
            action_low=-np.ones(actions),
            action_high=np.ones(actions),
            episode_steps=None,
            reward_terms={},
            seed=seed,
        )
        self.name = name
        self.env = env
        self._first_seed: int | None = seed
        self._first = {group: np.zeros_like(rows) for group, rows in self.observation.items()}
        self._reached = {group: np.zeros_like(rows) for group, rows in self.observation.items()}
        self._at_start = np.zeros(env.num_envs, np.bool_)
        self._outcome: tuple[NDArray[Any], Mask, Mask] | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Observation, dict[str, Any]]:
        """Starts every environment anew; without a seed the first time with the constructor's."""
        observation, _ = self.env.reset(seed=self._first_seed if seed is None else seed)
        self._first_seed = None
        self._first = self._rows(observation)
        self._at_start[:] = True
        return super().reset(seed=seed, options=options)

    def get_state(self) -> dict[str, NDArray[Any]]:
        """Raises StateUnavailable: Gymnasium has no way to ask an environment for its state."""
        raise StateUnavailable(f"{self.name} is a Gymnasium environment, which cannot give its state")

    def set_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Raises StateUnavailable, as `get_state` does."""
        raise StateUnavailable(f"{self.name} is a Gymnasium environment, which cannot take a state")

    def close_extras(self, **kwargs: Any) -> None:
        """Closes the environment."""
        self.env.close(**kwargs)

    def _simulate(self, action: Array) -> None:
        low, high = self._box.low, self._box.high
        flat = action.reshape(self.num_envs, *self._box.shape)
        scaled = np.clip(low + (flat + 1) / 2 * (high - low), low, high).astype(self._box.dtype)
        observation, reward, terminated, truncated, infos = self.env.step(scaled)
        self._outcome = reward, terminated, truncated
        self._at_start = np.logical_or(terminated, truncated)
        self._first = self._rows(observation)
        self._reached = {group: rows.copy() for group, rows in self._first.items()}
        for i in np.flatnonzero(self._at_start):
            final = infos["final_obs"][i]
            for group, rows in self._reached.items():
                rows[i] = np.ravel(final[group] if isinstance(final, dict) else final)

    def _evaluate(self) -> None:
        assert self._outcome is not None
        self.reward[:], self.terminated[:], self.truncated[:] = self._outcome

    def _observe(self, ids: Ids | slice, actor: Array, critic: Array) -> None:
        source = self._reached if isinstance(ids, slice) else self._first
        actor[:], critic[:] = source["actor"][ids], source["critic"][ids]

    def _begin(self, ids: Ids) -> None:
        """The environment has begun its next episode by itself, unless it was ended for a fault."""
        ended_by_us = np.zeros(self.num_envs, np.bool_)
        ended_by_us[ids] = ~self._at_start[ids]
        if not ended_by_us.any():
            return
        if not isinstance(self.env, SyncVectorEnv):
            raise RuntimeError(
                f"{self.name}: environment {np.flatnonzero(ended_by_us)[0]} gave a value that is not finite, "
                f"and {type(self.env).__name__} cannot reset one environment alone"
            )
        observation, _ = self.env.reset(options={"reset_mask": ended_by_us})
        for group, rows in self._rows(observation).items():
            self._first[group][ended_by_us] = rows[ended_by_us]

    def _rows(self, observation: Any) -> Observation:
        """The environment's observations as fresh float32 rows by group."""
        shape = (self.num_envs, -1)
        return {
            group: np.array(observation[group] if isinstance(observation, dict) else observation, np.float32).reshape(
                shape
            )
            for group in self._groups
        }


class GymnasiumTask(AdaptedTask):
    """An environment registered with Gymnasium, by id; `gymnasium_task` makes the subclass that knows the id."""

    env_id: str

    def __init__(
        self, num_envs: int, *, env_kwargs: dict[str, Any] | None = None, num_threads: int = 0, seed: int = 0
    ) -> None:
        """Makes the environments, one after the other in this process.

        Args:
            num_envs: Environments per rank.
            env_kwargs: Arguments for the environment's own constructor.
            num_threads: Not used: these environments step in one thread.
            seed: Seed of the first reset.
        """
        if num_envs < 1:
            raise UserError("task.num_envs", num_envs, "allowed: 1 or more")
        super().__init__(_make(self.env_id, num_envs, env_kwargs or {}), name=f"gymnasium:{self.env_id}", seed=seed)


def gymnasium_task(env_id: str) -> type[GymnasiumTask]:
    """The task class of a registered environment; raises UserError where Gymnasium does not know the id."""
    known = gymnasium.registry
    if env_id.split(":")[-1] not in known:
        close = difflib.get_close_matches(env_id, known, n=1)
        hint = f"did you mean gymnasium:{close[0]}?" if close else "allowed: an id registered with Gymnasium"
        raise UserError("task", f"gymnasium:{env_id}", hint)
    return type("GymnasiumTask", (GymnasiumTask,), {"env_id": env_id, "__doc__": GymnasiumTask.__doc__})


def _make(env_id: str, num_envs: int, env_kwargs: dict[str, Any]) -> VectorEnv[Any, Any, Any]:
    spec = gymnasium.registry[env_id.split(":")[-1]]
    try:
        if spec.entry_point is None:
            return gymnasium.make_vec(env_id, num_envs, vectorization_mode="vector_entry_point", **env_kwargs)
        return gymnasium.make_vec(
            env_id,
            num_envs,
            vectorization_mode="sync",
            vector_kwargs={"autoreset_mode": AutoresetMode.SAME_STEP},
            disable_env_checker=True,  # one per environment, and each would tell the same
            **env_kwargs,
        )
    except gymnasium.error.DependencyNotInstalled as error:
        raise UserError("task", f"gymnasium:{env_id}", str(error)) from error


def _observation_groups(space: spaces.Space[Any], name: str) -> dict[str, spaces.Box]:
    """The Boxes of `actor` and `critic`."""
    if isinstance(space, spaces.Box):
        return {"actor": space, "critic": space}
    if isinstance(space, spaces.Dict):
        actor, critic = space.spaces.get("actor"), space.spaces.get("critic")
        if isinstance(actor, spaces.Box) and isinstance(critic, spaces.Box):
            return {"actor": actor, "critic": critic}
    raise UserError("task", name, f"allowed: observations in a Box, or a Dict with Boxes actor and critic, not {space}")


def _action_box(space: spaces.Space[Any], name: str) -> spaces.Box:
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        raise UserError("task", name, f"allowed: actions in a Box of floating-point numbers, not {space}")
    if not (np.isfinite(space.low).all() and np.isfinite(space.high).all()):
        raise UserError("task", name, f"allowed: actions with finite bounds, not {space}")
    return space
