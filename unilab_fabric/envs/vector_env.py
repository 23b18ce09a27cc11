"""Reset, step, same-step autoreset and final observations: what every task of ours shares.

Gymnasium sees a `VectorEnv` (`reset`, `step`, final observations in `infos`). The collector calls `advance`, which
leaves its results in the arrays named below and makes no copies.

A task derives from `TaskEnv`, says its sizes and reward terms to the constructor and fills in four methods, called in
this order within a step: `_simulate`, `_evaluate`, `_observe`, and for ended environments `_begin` and `_observe`.
Arrays of one component per row are (components, N), so that each component is contiguous; what leaves the task is
(N, components).
"""

import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from gymnasium import spaces
from gymnasium.utils import seeding
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from numpy.typing import ArrayLike, NDArray

from unilab_fabric.errors import UserError
from unilab_fabric.spaces import Metric, Mirror, TaskSpec

Array = NDArray[np.float32]
Floats = NDArray[np.floating[Any]]
Ids = NDArray[np.intp]
Mask = NDArray[np.bool_]

EVERY = slice(None)
"""All environments, for the methods that take the ids of some."""

FAULTS = {
    "Env/physics_diverged": "the simulation diverged",
    "Env/nonfinite_action": "the action is not finite",
    "Env/nonfinite_observation": "the observation is not finite",
    "Env/nonfinite_reward": "the reward is not finite",
}
"""What ends one environment's episode though the task did not: the counter's tag and what the log says."""

_FAULTS_KEPT = 5
"""Faults of each kind that are kept with their values; one that repeats at every step would fill a disk."""

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What ended one environment's episode though the task did not."""

    kind: str
    """A tag of `FAULTS`."""
    environment: int
    episode_step: int
    """Steps since the episode began, the faulty one included."""
    nonfinite: tuple[str, ...]
    """Which values are not finite: reward terms by name, entries of an observation or action by number."""
    values: dict[str, list[float]]
    """The environment's values of that step, by what they are."""


class StateUnavailable(Exception):
    """The environments cannot give or take their state, so a resumed run starts them anew."""


class TaskEnv(VectorEnv[dict[str, Array], Array, NDArray[Any]]):
    """Base of every task; N is `num_envs`. After `reset` and after `advance` these arrays hold the newest step."""

    observation: dict[str, Array]
    """`actor` (N, a) and `critic` (N, c): what the policy sees next; after an episode's end that of the new one."""
    next_observation: dict[str, Array]
    """The same for the state the step reached: for an ended episode its true last observation."""
    reward: Array
    """(N,)"""
    terminated: Mask
    """(N,): failure; cuts the bootstrap."""
    truncated: Mask
    """(N,): time limit, and not terminated too; the value goes on."""
    metrics: tuple[Metric, ...]
    """What `totals` counts."""
    totals: NDArray[np.float64]
    """(len(metrics), 2): sum and count, added to by `advance`; whoever reads them sets them to zero."""
    physics_s: float
    """Seconds [s] of `advance` in the simulation; whoever reads it sets it to zero."""
    faults: list[Fault]
    """The first faults of each kind; whoever reads them empties the list."""

    name: str
    """The task's name in `task_spec`."""
    mirrors: dict[Literal["actor", "critic", "action"], Mirror] | None = None
    """Left-right reflections of `actor`, `critic` and `action`, where the task has that symmetry."""

    # For subclasses, rewritten by every step.
    terms: Array
    """(reward terms, N): the values f of the reward terms, without weights; `_evaluate` fills it."""
    figures: Array
    """(figures, N): what is averaged over an episode besides; `_evaluate` fills it."""
    episode_length: NDArray[np.int64]
    """(N,): steps since the episode began, the present one included."""
    mutable: dict[str, NDArray[Any]]
    """Live arrays that `get_state` copies and `set_state` writes; a task adds its own."""

    def __init__(
        self,
        *,
        num_envs: int,
        actor_size: int,
        critic_size: int,
        action_low: ArrayLike,
        action_high: ArrayLike,
        episode_steps: int | None,
        reward_terms: Mapping[str, float],
        reward_factor: float = 1.0,
        figures: Sequence[str] = (),
        falls: bool = False,
        gauges: Sequence[str] = (),
        stagger: bool = False,
        seed: int = 0,
    ) -> None:
        """Allocates everything a step needs.

        Args:
            num_envs: Environments.
            actor_size: Entries of one actor observation.
            critic_size: Entries of one critic observation.
            action_low: (actions,), least values.
            action_high: (actions,), greatest values.
            episode_steps: Control steps until the time limit; None leaves `truncated` to `_evaluate`.
            reward_terms: Weight per second of each reward term; with none, `_evaluate` fills `reward` itself.
            reward_factor: What the weighted sum is multiplied by: the control step [s] times any scale.
            figures: Names of what `figures` holds.
            falls: Whether a termination is a fall: reported as `fell` and `Episode/falls`.
            gauges: Tags of metrics besides, the last rows of `totals`; the task adds to them.
            stagger: First episodes end after a random part of the time limit, so that time-outs do not coincide.
            seed: Seed of the generator, until `reset` brings another.
        """
        if num_envs < 1:
            raise UserError("task.num_envs", num_envs, "allowed: 1 or more")
        self.num_envs = num_envs
        self.name = type(self).__name__
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP, "render_modes": []}
        low, high = np.asarray(action_low, np.float32), np.asarray(action_high, np.float32)
        self.single_action_space = spaces.Box(low, high, dtype=np.float32)
        self._action_low, self._action_high = tuple(low.tolist()), tuple(high.tolist())
        self.single_observation_space = spaces.Dict(
            {
                "actor": spaces.Box(-np.inf, np.inf, (actor_size,), np.float32),
                "critic": spaces.Box(-np.inf, np.inf, (critic_size,), np.float32),
            }
        )
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self._np_random, self._np_random_seed = seeding.np_random(seed)

        # After physics the caches are cold and each numpy call counts. So all floats that a step produces are one
        # block, which one call looks through for non-finite values, and one call adds reward, terms and figures to
        # the sums of the running episodes.
        rows = 1 + len(reward_terms) + len(figures)
        observed = num_envs * (actor_size + critic_size)
        self._produced = np.zeros(rows * num_envs + observed, np.float32)
        self._step_rows = self._produced[: rows * num_envs].reshape(rows, num_envs)
        self._episode_rows = np.zeros_like(self._step_rows)
        self.reward = self._step_rows[0]
        self.terms = self._step_rows[1 : 1 + len(reward_terms)]
        self.figures = self._step_rows[1 + len(reward_terms) :]
        self._next_block = self._produced[rows * num_envs :]
        self._block = np.zeros(observed, np.float32)
        self.observation = _split(self._block, num_envs, actor_size)
        self.next_observation = _split(self._next_block, num_envs, actor_size)
        self.terminated = np.zeros(num_envs, np.bool_)
        self.truncated = np.zeros(num_envs, np.bool_)
        self._ended = np.zeros(num_envs, np.bool_)
        self._faulty = np.zeros(num_envs, np.bool_)
        self._any_faulty = False
        self.episode_length = np.zeros(num_envs, np.int64)
        self._whole_episode = np.iinfo(np.int64).max if episode_steps is None else episode_steps
        self._time_limit = np.zeros(num_envs, np.int64)
        self._stagger = stagger

        self._term_names = tuple(reward_terms)
        self._row_names = (*self._term_names, *figures, "reward")
        weights = np.array(list(reward_terms.values()), np.float32)
        self._reward_weights = weights * np.float32(reward_factor)
        self._neutral_action = np.clip(np.float32(0), low, high)

        self._episode_names = ("r", "l", *self._term_names, *figures, *(["fell"] if falls else []))
        self._row_scale = np.concatenate([weights, np.ones(len(figures), np.float32)])[:, None]
        self._falls = falls
        self._last_ids: Ids = np.zeros(0, np.intp)
        self._last_episodes = np.zeros((len(self._episode_names), 0), np.float64)
        self.metrics = (
            Metric(name="Train/mean_reward"),
            Metric(name="Train/mean_episode_length"),
            *(Metric(name=f"Episode/{name}") for name in (*self._term_names, *figures)),
            *([Metric(name="Episode/falls")] if falls else []),
            *(Metric(name=tag, kind="total") for tag in FAULTS),
            *(Metric(name=tag) for tag in gauges),
        )
        self.totals = np.zeros((len(self.metrics), 2))
        self._fault_row = {tag: len(self._episode_names) + i for i, tag in enumerate(FAULTS)}
        self._faults_kept = dict.fromkeys(FAULTS, 0)
        self.faults = []
        self.physics_s = 0.0

        self.mutable = {
            "observation/actor": self.observation["actor"],
            "observation/critic": self.observation["critic"],
            "episode/length": self.episode_length,
            "episode/time_limit": self._time_limit,
            "episode/sums": self._episode_rows,
            "totals": self.totals,
        }

    # What a task fills in.

    def _restart(self) -> None:
        """What `reset` draws before all episodes begin; nothing, unless a task keeps something between episodes."""

    def _begin(self, ids: Ids) -> None:
        """Puts these environments at the start of an episode."""
        raise NotImplementedError

    def _simulate(self, action: Array) -> Mask | None:
        """One control step of physics with finite actions (N, actions); the environments that diverged, if any."""
        raise NotImplementedError

    def _evaluate(self) -> None:
        """Fills `terms`, `figures` and `terminated` from the state just reached."""
        raise NotImplementedError

    def _observe(self, ids: Ids | slice, actor: Array, critic: Array) -> None:
        """Writes the observations of these environments; `EVERY` comes right after `_simulate`, ids after `_begin`."""
        raise NotImplementedError

    # What the learner and the collector use.

    def task_spec(self) -> TaskSpec:
        """Sizes, limits, metrics and mirrors, for the learner."""
        return TaskSpec(
            name=self.name,
            num_envs=self.num_envs,
            actor_size=self.observation["actor"].shape[1],
            critic_size=self.observation["critic"].shape[1],
            action_low=self._action_low,
            action_high=self._action_high,
            metrics=self.metrics,
            mirrors=self.mirrors,
        )

    def contract(self) -> dict[str, Any]:
        """What a robot's program must know to run a policy of this task, as plain values: docs/deploy.md has its keys.

        Raises UserError where the task has none.
        """
        raise UserError("task", self.name, "it has no contract for a robot's program; allowed: a task that defines one")

    def planar_motion(self) -> tuple[NDArray[Any], NDArray[Any]] | None:
        """Commanded and actual planar velocity (2,) [m/s] of environment 0 in its heading's frame, to be drawn; or
        None."""
        return None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Array], dict[str, Any]]:
        """Starts every environment anew; a seed replaces the generator, and there are no options."""
        if options:
            raise ValueError(f"reset options are {sorted(options)}; a task takes none")
        super().reset(seed=seed)
        self.totals[:] = 0
        self._restart()
        self._start_episodes(np.arange(self.num_envs))
        if self._stagger:
            self._time_limit[:] = self.np_random.integers(1, self._whole_episode, self.num_envs, endpoint=True)
        for group, observation in self.observation.items():
            self.next_observation[group][:] = observation
        return {group: observation.copy() for group, observation in self.observation.items()}, {}

    def step(self, actions: Array) -> tuple[dict[str, Array], Array, Mask, Mask, dict[str, Any]]:
        """`advance` for users of Gymnasium: fresh copies, and final observations and episode figures in `infos`."""
        self.advance(np.array(actions, np.float32))  # a copy, as `advance` may write to it
        return (
            {group: observation.copy() for group, observation in self.observation.items()},
            self.reward.copy(),
            self.terminated.copy(),
            self.truncated.copy(),
            self._infos(),
        )

    def advance(self, action: Array) -> None:
        """One control step of all environments with (N, actions), same-step autoreset included.

        An action that is not finite is replaced in place by the middle of its range.
        """
        self.episode_length += 1
        action = self._finite(action)
        since = time.perf_counter()
        diverged = self._simulate(action)
        self.physics_s += time.perf_counter() - since
        if diverged is not None:
            self._fault("Env/physics_diverged", diverged, {})
        np.greater_equal(self.episode_length, self._time_limit, out=self.truncated)
        self._evaluate()
        if self._term_names:
            np.matmul(self._reward_weights, self.terms, out=self.reward)
        self._observe(EVERY, self.next_observation["actor"], self.next_observation["critic"])
        if not np.isfinite(self._produced).all():
            self._find_nonfinite()
        if self._any_faulty:
            self._neutralise()
        np.greater(self.truncated, self.terminated, out=self.truncated)
        np.logical_or(self.terminated, self.truncated, out=self._ended)
        self._episode_rows += self._step_rows
        self._block[:] = self._next_block
        (self._last_ids,) = self._ended.nonzero()
        if self._last_ids.size:
            self._finish_episodes(self._last_ids)
            self._start_episodes(self._last_ids)

    def get_state(self) -> dict[str, NDArray[Any]]:
        """All mutable state, as arrays that `np.load(allow_pickle=False)` reads back.

        Raises StateUnavailable for foreign environments that cannot be saved.
        """
        state = {name: array.copy() for name, array in self.mutable.items()}
        state["generator"] = encode_generator(self.np_random)
        return state

    def set_state(self, state: dict[str, NDArray[Any]]) -> None:
        """Continues bit for bit where `get_state` was called, on a task made with the same settings.

        Raises ValueError for a state of other environments, StateUnavailable as `get_state` does.
        """
        expected = {name: array.shape for name, array in self.mutable.items()}
        given = {name: np.shape(array) for name, array in state.items() if name != "generator"}
        differing = sorted(name for name in given.keys() | expected.keys() if given.get(name) != expected.get(name))
        if differing:
            each = (f"{name} has the shape {given.get(name)} there and {expected.get(name)} here" for name in differing)
            raise ValueError("; ".join(each))
        for name, array in self.mutable.items():
            array[...] = state[name]
        decode_generator(self.np_random, state["generator"])

    # The parts of a step.

    def _finite(self, action: Array) -> Array:
        """The action; where it is not finite, the middle of its range, and the environment is at fault."""
        if action.shape != self.action_space.shape:
            raise ValueError(f"actions have the shape {action.shape}; this task takes {self.action_space.shape}")
        if np.isfinite(action).all():
            return action
        bad = _nonfinite_rows(action)
        self._fault("Env/nonfinite_action", bad, {"action": action})
        action[bad] = self._neutral_action  # in place: what goes into replay is what was done
        return action

    def _find_nonfinite(self) -> None:
        rows_of_step = (*self._step_rows[1:], self.reward)  # what is the cause first, and then the sum
        named = {name: row[:, None] for name, row in zip(self._row_names, rows_of_step, strict=True)}
        self._fault("Env/nonfinite_reward", _nonfinite_rows(self._step_rows.T), named)
        for group, observation in self.next_observation.items():
            rows = {f"{group} observation": observation}
            self._fault("Env/nonfinite_observation", _nonfinite_rows(observation), rows)

    def _fault(self, tag: str, mask: Mask, rows: Mapping[str, Array]) -> None:
        """Counts these environments' fault; an environment counts once a step, by its first fault.

        `rows` are the values (N, k) in which it shows, by what they are.
        """
        new = np.flatnonzero(mask & ~self._faulty)
        if not new.size:
            return
        self._faulty[new] = self._any_faulty = True
        self.totals[self._fault_row[tag]] += new.size
        for environment in new[: _FAULTS_KEPT - self._faults_kept[tag]].tolist():
            fault = self._describe_fault(tag, environment, rows)
            self.faults.append(fault)
            if self._faults_kept[tag] == 0:
                _LOG.warning(
                    "%s in environment %d at step %d of its episode%s; the episode ends there (told once, counted as "
                    "%s)",
                    FAULTS[tag],
                    environment,
                    fault.episode_step,
                    f", in {', '.join(fault.nonfinite)}" if fault.nonfinite else "",
                    tag,
                )
            self._faults_kept[tag] += 1

    def _describe_fault(self, tag: str, environment: int, rows: Mapping[str, Array]) -> Fault:
        values = {name: block[environment].tolist() for name, block in rows.items()}
        nonfinite = [
            name if len(row) == 1 else f"{name}[{entry}]"
            for name, row in values.items()
            for entry, value in enumerate(row)
            if not math.isfinite(value)
        ]
        return Fault(
            kind=tag,
            environment=environment,
            episode_step=int(self.episode_length[environment]),
            nonfinite=tuple(nonfinite),
            values=values,
        )

    def _neutralise(self) -> None:
        """Makes of a faulty step an ordinary failure: no reward, terminated, and the observation before it."""
        self._step_rows[:, self._faulty] = 0
        self.terminated[self._faulty] = True
        for group, observation in self.observation.items():
            self.next_observation[group][self._faulty] = observation[self._faulty]
        self._faulty[:] = self._any_faulty = False

    def _finish_episodes(self, ids: Ids) -> None:
        """Adds these environments' episodes to `totals` and keeps them for `_infos`."""
        length = self.episode_length[ids]
        sums = self._episode_rows[:, ids]
        rows = [sums[:1], length[None], sums[1:] * self._row_scale / length]
        if self._falls:
            rows.append(self.terminated[None, ids])
        self._last_episodes = np.concatenate(rows, dtype=np.float64)
        self.totals[: len(self._last_episodes), 0] += self._last_episodes.sum(axis=1)
        self.totals[: len(self._last_episodes), 1] += ids.size

    def _start_episodes(self, ids: Ids) -> None:
        """Begins these environments' next episodes and writes their first observations."""
        self._episode_rows[:, ids] = 0
        self.episode_length[ids] = 0
        self._time_limit[ids] = self._whole_episode
        self._begin(ids)
        block = np.empty(ids.size * (self._block.size // self.num_envs), np.float32)
        first = _split(block, ids.size, self.observation["actor"].shape[1])
        self._observe(ids, first["actor"], first["critic"])
        if not np.isfinite(block).all():
            self.totals[self._fault_row["Env/nonfinite_observation"]] += 1
            np.nan_to_num(block, copy=False, posinf=0, neginf=0)
        for group, rows in first.items():
            self.observation[group][ids] = rows

    def _infos(self) -> dict[str, Any]:
        """Gymnasium's infos of the newest step: empty unless an episode ended."""
        if not self._last_ids.size:
            return {}
        final_obs = np.full(self.num_envs, None, dtype=object)
        for i in self._last_ids:
            final_obs[i] = {group: rows[i].copy() for group, rows in self.next_observation.items()}
        episode: dict[str, NDArray[Any]] = {}
        for name, values in zip(self._episode_names, self._last_episodes, strict=True):
            kind = np.int64 if name == "l" else np.bool_ if name == "fell" else np.float64
            episode[name] = np.zeros(self.num_envs, kind)
            episode[name][self._last_ids] = values
        return {
            "final_obs": final_obs,
            "_final_obs": self._ended.copy(),
            "final_info": {"episode": episode, "_episode": self._ended.copy()},
            "_final_info": self._ended.copy(),
            "episode": {name: values.copy() for name, values in episode.items()},
            "_episode": self._ended.copy(),
        }


def _split(block: Array, num_envs: int, actor_size: int) -> dict[str, Array]:
    """Views of a flat block as actor and critic observations."""
    cut = num_envs * actor_size
    return {"actor": block[:cut].reshape(num_envs, -1), "critic": block[cut:].reshape(num_envs, -1)}


def _nonfinite_rows(rows: Array) -> Mask:
    """(n, k) -> (n,): where a row holds a value that is not finite."""
    return np.logical_not(np.isfinite(rows).all(axis=1))


def control_steps(episode_s: float, control_step_s: float) -> int:
    """Control steps until a time limit [s], rounded up; raises UserError where it is shorter than one step."""
    if not control_step_s <= episode_s < math.inf:
        raise UserError("task.episode_s", episode_s, f"allowed: {control_step_s} s (one control step) or more")
    return math.ceil(episode_s / control_step_s - 1e-9)  # 20 s / 0.02 s are 1000 steps, whatever the last bit says


_LOW_64 = (1 << 64) - 1


def encode_generator(generator: np.random.Generator) -> NDArray[np.uint64]:
    """The state of a PCG64 generator as six words: state and increment (low, high), and its half-used output."""
    pcg = generator.bit_generator.state
    state, increment = int(pcg["state"]["state"]), int(pcg["state"]["inc"])
    words = [state & _LOW_64, state >> 64, increment & _LOW_64, increment >> 64, pcg["has_uint32"], pcg["uinteger"]]
    return np.array(words, np.uint64)


def decode_generator(generator: np.random.Generator, words: NDArray[np.uint64]) -> None:
    """Sets a PCG64 generator to what `encode_generator` saw."""
    state_low, state_high, increment_low, increment_high, has_uint32, uinteger = (int(word) for word in words)
    generator.bit_generator.state = {
        "bit_generator": "PCG64",
        "state": {"state": state_low | state_high << 64, "inc": increment_low | increment_high << 64},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
