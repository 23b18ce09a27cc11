"""What a policy is worth: deterministic episodes on the faithful physics."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from unilab_fabric.arguments import argument_types
from unilab_fabric.checkpoints import REPLICATED, read_manifest, saved_config, verify
from unilab_fabric.config import resolve_run
from unilab_fabric.envs.registry import make_task, task_class
from unilab_fabric.envs.vector_env import TaskEnv
from unilab_fabric.learners.learner import Replicated
from unilab_fabric.policies import trained_learner
from unilab_fabric.sources import overlay

_Z_95 = 1.959964  # two-sided 95% quantile of the normal distribution
_NAMES = {"r": "return", "l": "length"}


def evaluate(
    ckpt_path: Path,
    *,
    episodes: int,
    episode_s: float,
    physics: str,
    seed: int,
    overrides: Mapping[str, Any] | None = None,
    num_threads: int = 0,
) -> dict[str, Any]:
    """Runs `episodes` environments, each for one episode of at most `episode_s` [s], with the policy's mean actions.

    The task keeps the settings of the run but for its physics, its length and its number of environments, and for
    `overrides`, arguments of the task. Returns plain values: what was evaluated, what of the task was changed, and for
    each figure the mean over episodes and the bounds of its 95% interval. `num_threads` are those of physics, 0 for one
    on each core. Raises UserError for a checkpoint that cannot
    be read, UserErrors for overrides that the task does not take.
    """
    manifest = read_manifest(ckpt_path)
    verify(ckpt_path, REPLICATED)
    saved = saved_config(ckpt_path)
    config = resolve_run(overlay(saved, {"task": {"init_args": dict(overrides or {})}}))
    judged = _judging(config.task.class_path, episodes, episode_s, physics)
    settings = config.task.init_args | judged
    env = make_task(config.task.class_path, settings, seed=seed, num_threads=num_threads)
    learner = trained_learner(ckpt_path, config, env.task_spec())
    figures = first_episodes(env, learner, seed)
    return {
        "checkpoint": str(ckpt_path),
        "tick": manifest["tick"],
        "env_steps": manifest["env_steps"],
        "task": config.task.class_path,
        "physics": judged.get("physics"),  # null where the task has no such choice
        "episodes": episodes,
        "episode_s": judged.get("episode_s"),
        "seed": seed,
        "changed": changes_of(resolve_run(saved).task.init_args, settings),
        "figures": {_NAMES.get(name, name): _summary(values) for name, values in figures.items()},
    }


def _judging(task: str, episodes: int, episode_s: float, physics: str) -> dict[str, Any]:
    """What differs from the run's own settings, as far as the task has such a setting."""
    wanted = {"num_envs": episodes, "episode_s": episode_s, "physics": physics, "stagger": False}
    settings = argument_types(task_class(task))
    return {name: value for name, value in wanted.items() if name in settings}


def changes_of(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Arguments of the task that differ from the run's, by name: the run's value and this one's."""
    changes: dict[str, list[Any]] = {}
    for name in sorted((before.keys() | now.keys()) - {"num_envs"}):
        old, new = before.get(name), now.get(name)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= {f"{name}.{part}": pair for part, pair in changes_of(old, new).items()}
        elif old != new:
            changes[name] = [old, new]
    return changes


@torch.no_grad()
def first_episodes(env: TaskEnv, learner: Replicated, seed: int) -> dict[str, NDArray[Any]]:
    """The figures of each environment's first episode, (num_envs,) by name, under the deterministic policy."""
    policy = learner.policy().eval()
    observation, _ = env.reset(seed=seed)
    figures: dict[str, NDArray[Any]] = {}
    running = np.ones(env.num_envs, np.bool_)
    while running.any():
        action = policy(torch.from_numpy(observation["actor"])).numpy()
        observation, _, _, _, infos = env.step(action)
        if "episode" not in infos:
            continue
        ended = infos["_episode"] & running
        for name, values in infos["episode"].items():
            figures.setdefault(name, np.zeros(env.num_envs))[ended] = values[ended]
        running &= ~ended
    return figures


def format_table(result: dict[str, Any]) -> str:
    """The result as a table for a terminal, one figure a line."""
    rows = [("figure", "mean", "95% interval")]
    for name, one in result["figures"].items():
        rows.append((name, f"{one['mean']:.4g}", f"{one['low']:.4g} to {one['high']:.4g}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    length = "" if result["episode_s"] is None else f" of at most {result['episode_s']:g} s"
    physics = "" if result["physics"] is None else f"{result['physics']} physics, "
    trained = f"tick {result['tick']} ({result['env_steps']:,} env steps)"
    title = f"{result['task']}, {result['episodes']} episodes{length}, {physics}{trained}"
    changes = [f"  {name}: {before} in the run, {now} here" for name, (before, now) in result["changed"].items()]
    told = ["not as in the run:", *changes, ""] if changes else []
    return "\n".join([title, "", *told, *lines])


def _summary(values: NDArray[Any]) -> dict[str, float]:
    """Mean over episodes with its 95% interval: Wilson's for a share, else the normal approximation."""
    if values.dtype == np.bool_ or set(np.unique(values)) <= {0.0, 1.0}:
        low, high = wilson_interval(int(values.sum()), len(values))
        return {"mean": float(values.mean()), "low": low, "high": high}
    mean = float(values.mean())
    half = _Z_95 * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.inf
    return {"mean": mean, "low": mean - half, "high": mean + half}


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95% interval of a probability; Wilson 1927, the score interval."""
    share, z2 = successes / trials, _Z_95**2
    centre = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = _Z_95 / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)
