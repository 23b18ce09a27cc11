"""Small tasks, settings and batches for the learners' tests."""

import torch

from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.learner import Batch
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import Mirror, TaskSpec

CPU = torch.device("cpu")


def spec(actor=6, critic=9, mirrors=None):
    return TaskSpec(
        name="small",
        num_envs=32,
        actor_size=actor,
        critic_size=critic,
        action_low=(-1.0, -0.5, -2.0),
        action_high=(1.0, 1.5, 2.0),
        metrics=(),
        mirrors=mirrors,
    )


def mirrors(actor=6, critic=9, action=3):
    """Swaps the first two entries and turns the sign of the last."""
    return {
        name: Mirror(index=(1, 0, *range(2, size)), sign=(*[1.0] * (size - 1), -1.0))
        for name, size in [("actor", actor), ("critic", critic), ("action", action)]
    }


def config(**changed):
    settings = {
        "actor_hidden": (32, 16),
        "critic_hidden": (48, 32),
        "atoms": 21,
        "v_min": -3.0,
        "v_max": 5.0,
        "batch_size": 24,
        "updates_per_tick": 2,
        "actor_every": 2,
        "tau": 0.1,
        "temperature": 0.05,
        "actor_learning_rate": 1e-3,
        "critic_learning_rate": 2e-3,
        "temperature_learning_rate": 3e-3,
    }
    return FastSAC(**(settings | changed))


def build(settings, task, *, seed=1, total_updates=100, ranks=None, precision="32-true"):
    return settings.build(task, CPU, precision, ranks or Ranks(), seed, total_updates)


def batch(task, rows=24, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    low, high = torch.tensor(task.action_low), torch.tensor(task.action_high)
    uniform = torch.rand(rows, task.action_size, generator=generator)
    return Batch(
        actor=2.0 * normal(rows, task.actor_size) + 1.0,
        critic=0.5 * normal(rows, task.critic_size) - 1.0,
        action=low + (high - low) * uniform,
        reward=normal(rows),
        next_actor=2.0 * normal(rows, task.actor_size) + 1.0,
        next_critic=0.5 * normal(rows, task.critic_size) - 1.0,
        terminated=torch.rand(rows, generator=generator) < 0.2,
        discount=0.97 ** torch.randint(1, 4, (rows,), generator=generator),
    )


def join(batches):
    return Batch(**{name: torch.cat([getattr(one, name) for one in batches]) for name in vars(batches[0])})
