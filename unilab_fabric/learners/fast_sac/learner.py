"""FastSAC: soft actor-critic with categorical critics, tuned for thousands of environments."""

import copy
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from unilab_fabric.errors import UserError, UserErrors
from unilab_fabric.learners.actor import Actor
from unilab_fabric.learners.critic import CategoricalCritics
from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.fast_sac.losses import (
    actor_loss,
    categorical_loss,
    project,
    shifted_atoms,
    temperature_gradient,
)
from unilab_fabric.learners.learner import Batch
from unilab_fabric.learners.symmetry import MirrorHalf
from unilab_fabric.parallel.flat import FlatAdamW, FlatParameters
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.statistics import RunningNormaliser, batch_moments
from unilab_fabric.spaces import TaskSpec

CRITIC_METRICS = (
    "Loss/critic",
    "Loss/grad_norm_critic",
    "Policy/entropy",
    "Policy/temperature",
    "Policy/q_mean",
    "Loss/learning_rate",
)
ACTOR_METRICS = ("Loss/actor", "Loss/grad_norm_actor", "Policy/mean_std")


class FastSACLearner:
    """One rank's FastSAC; see docs/learners.md. An update has one collective per critic and one per actor step.

    The tail of the critics' reduced buffer carries the temperature's gradient and, at the first update of a tick, the
    moments of each rank's batch: every rank fills its own place and adds zero to the others', so the mean over ranks
    gathers them.
    """

    metric_names: tuple[str, ...] = (*CRITIC_METRICS, *ACTOR_METRICS)
    generators: Mapping[str, torch.Generator]
    replicated: Mapping[str, Tensor]

    def __init__(
        self,
        config: FastSAC,
        spec: TaskSpec,
        device: torch.device,
        precision: str,
        ranks: Ranks,
        seed: int,
        total_updates: int,
    ) -> None:
        _check_task(config, spec)
        self.config = config
        self.ranks = ranks
        self.device = device
        self.updates_per_tick = config.updates_per_tick
        self.batch_size = config.batch_size
        self._bf16 = precision == "bf16-mixed"
        self._target_entropy = -config.target_entropy_ratio * spec.action_size
        self._final_lr = config.final_lr_fraction
        self._horizon = max(total_updates, 1)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = Actor(
                spec.actor_size,
                config.actor_hidden,
                spec.action_low,
                spec.action_high,
                config.normalize_observations,
            ).to(device)
            self.critic = CategoricalCritics(
                config.num_critics,
                spec.critic_size,
                spec.action_size,
                config.critic_hidden,
                torch.linspace(config.v_min, config.v_max, config.atoms),
                RunningNormaliser(spec.critic_size) if config.normalize_observations else nn.Identity(),
            ).to(device)
        self.target = copy.deepcopy(self.critic)
        self.target.normaliser = self.critic.normaliser
        self._normalisers = [
            (name, module)
            for name, module in [("actor", self.actor.normaliser), ("critic", self.critic.normaliser)]
            if isinstance(module, RunningNormaliser)
        ]
        moments = sum(2 * module.size for _, module in self._normalisers)

        self.actor_flat = FlatParameters(self.actor)
        self.critic_flat = FlatParameters(self.critic, tail=1 + ranks.world_size * moments)
        self.target_flat = FlatParameters(self.target)
        self._temperature_gradient = self.critic_flat.tail[:1]
        self._moments = self.critic_flat.tail[1:].view(ranks.world_size, moments)
        self.log_temperature = nn.Parameter(torch.full((1,), math.log(config.temperature), device=device))
        self.log_temperature.grad = self._temperature_gradient

        self._learning_rates = torch.tensor(
            [config.critic_learning_rate, config.temperature_learning_rate, config.actor_learning_rate], device=device
        )
        self._lr = self._learning_rates.clone()
        self.critic_adam = FlatAdamW(
            [
                (self.critic_flat.values, self._lr[0], config.weight_decay),
                (self.log_temperature, self._lr[1], 0.0),
            ],
            config.betas,
        )
        self.actor_adam = FlatAdamW([(self.actor_flat.values, self._lr[2], config.weight_decay)], config.betas)

        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._acted_ticks = torch.zeros((), dtype=torch.int64, device=device)
        self._mirror_half = MirrorHalf(spec.mirrors, device) if config.symmetry and spec.mirrors else None
        self._noise = torch.Generator(device).manual_seed(seed)
        self.generators = {"noise": self._noise}
        self.metrics = torch.zeros(len(self.metric_names), 2, dtype=torch.float64, device=device)
        self.replicated = self._replicated()

    def _replicated(self) -> dict[str, Tensor]:
        state = {
            "critic": self.critic_flat.values.data,
            "actor": self.actor_flat.values.data,
            "target_critic": self.target_flat.values.data,
            "log_temperature": self.log_temperature.data,
            **self.critic_adam.replicated("critic", self.critic_flat.values),
            **self.critic_adam.replicated("log_temperature", self.log_temperature),
            **self.actor_adam.replicated("actor", self.actor_flat.values),
            "updates": self._updates,
            "skipped_updates": self._skipped,
            "acted_ticks": self._acted_ticks,
        }
        for name, module in self._normalisers:
            state |= module.replicated(f"{name}/normaliser")
        return state

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """Sampled actions for (num_envs, actor observation), (num_envs, actions) in the environment's units."""
        with self._autocast():
            action, _, _ = self.actor.sample(observation, self._standard_normal(observation))
        if self.config.random_ticks > 0:
            uniform = torch.empty_like(action).uniform_(-1.0, 1.0, generator=self._noise)
            uniform = uniform * self.actor.scale + self.actor.offset
            action = torch.where(self._acted_ticks < self.config.random_ticks, uniform, action)
        self._acted_ticks += 1
        return action

    def update(self, batch: Batch, index: int) -> None:
        """Critic and temperature, the actor at every `actor_every`th update, and the target critic."""
        if self._mirror_half is not None:
            batch = self._mirror_half(batch)
        self._schedule_learning_rates()
        self._update_critic(batch, first_of_tick=index % self.updates_per_tick == 0)
        if index % self.config.actor_every == 0:
            self._update_actor(batch)
        self._updates += 1

    def policy(self) -> Actor:
        """The deterministic policy, normaliser inside: (n, actor observation) -> (n, actions)."""
        return self.actor

    def skipped_updates(self) -> Tensor:
        """Optimiser steps skipped for a non-finite gradient since the start, an integer tensor on the device."""
        return self._skipped

    def _update_critic(self, batch: Batch, first_of_tick: bool) -> None:
        temperature = self.log_temperature.detach().exp()
        self.critic_flat.zero_gradient()
        with self._autocast():
            target, next_log_prob = self._critic_target(batch, temperature)
            logits = self.critic(batch.critic, batch.action)
        loss = categorical_loss(logits, target)
        loss.backward()  # type: ignore[no-untyped-call]
        self._temperature_gradient.copy_(temperature_gradient(next_log_prob, temperature, self._target_entropy))
        if first_of_tick:
            self._write_moments(batch)

        self.ranks.mean_(self.critic_flat.reduced)
        norm = self.critic_flat.clip_norm_(self.config.max_grad_norm)
        # the temperature's gradient and the moments lie in the same reduced buffer: one verdict, the same on all ranks
        kept = norm.isfinite() & self.critic_flat.tail.isfinite().all()
        self._step(self.critic_adam, kept)
        if first_of_tick:
            self._merge_moments(batch.reward.shape[0], kept)
        self.target_flat.values.data.lerp_(self.critic_flat.values.data, self.config.tau * kept)
        value = self.critic.value(logits.detach()).mean()
        self._count(
            CRITIC_METRICS,
            kept,
            [loss.detach(), norm, -next_log_prob.mean(), temperature.squeeze(), value, self._lr[0]],
        )

    @torch.no_grad()
    def _critic_target(self, batch: Batch, temperature: Tensor) -> tuple[Tensor, Tensor]:
        """Each target critic's projected distribution (M, B, K), and log pi(a'|o') (B,)."""
        next_action, next_log_prob, _ = self.actor.sample(batch.next_actor, self._standard_normal(batch.next_actor))
        probabilities = self.target(batch.next_critic, next_action).softmax(-1)
        moved = shifted_atoms(
            self.critic.atoms, batch.reward, batch.terminated, batch.discount, next_log_prob, temperature
        )
        return project(probabilities, moved, self.critic.atoms), next_log_prob

    def _update_actor(self, batch: Batch) -> None:
        temperature = self.log_temperature.detach().exp()
        self.actor_flat.zero_gradient()
        with self._autocast():
            action, log_prob, log_std = self.actor.sample(batch.actor, self._standard_normal(batch.actor))
            value = self.critic.value(self.critic(batch.critic, action))
        loss = actor_loss(log_prob, value, temperature)
        loss.backward(inputs=list(self.actor.parameters()))  # type: ignore[no-untyped-call]

        self.ranks.mean_(self.actor_flat.reduced)
        norm = self.actor_flat.clip_norm_(self.config.max_grad_norm)
        kept = norm.isfinite()
        self._step(self.actor_adam, kept)
        self._count(ACTOR_METRICS, kept, [loss.detach(), norm, log_std.detach().exp().mean()])

    def _step(self, adam: FlatAdamW, kept: Tensor) -> None:
        adam.found_inf = (~kept).float()
        adam.step()
        self._skipped += ~kept

    def _schedule_learning_rates(self) -> None:
        progress = (self._updates / self._horizon).clamp(max=1.0)
        self._lr.copy_(self._learning_rates * (1.0 - (1.0 - self._final_lr) * progress))

    def _write_moments(self, batch: Batch) -> None:
        rows = {"actor": batch.actor, "critic": batch.critic}
        moments = [batch_moments(rows[name]).flatten() for name, _ in self._normalisers]
        if moments:
            self._moments[self.ranks.rank].copy_(torch.cat(moments))

    def _merge_moments(self, rows: int, kept: Tensor) -> None:
        gathered = self._moments * self.ranks.world_size  # the mean over ranks divided each rank's own by their number
        start = 0
        for _, module in self._normalisers:
            own = gathered[:, start : start + 2 * module.size]
            module.merge(own.reshape(-1, 2, module.size), rows, kept)
            start += 2 * module.size

    def _count(self, names: tuple[str, ...], kept: Tensor, values: list[Tensor]) -> None:
        """Adds one report of each to `metrics`; a skipped step reports nothing."""
        first = self.metric_names.index(names[0])
        rows = self.metrics[first : first + len(names)]
        rows[:, 0] += torch.where(kept, torch.stack(values), 0.0)
        rows[:, 1] += kept

    def _standard_normal(self, observation: Tensor) -> Tensor:
        shape = (observation.shape[0], self.actor.scale.shape[0])
        return torch.randn(shape, generator=self._noise, device=self.device)

    def _autocast(self) -> AbstractContextManager[None]:
        # the cache of cast weights would hand a captured graph the weights of the capture
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._bf16, cache_enabled=False)


def _check_task(config: FastSAC, spec: TaskSpec) -> None:
    problems = []
    if config.symmetry and spec.mirrors is None:
        problems.append(UserError("learner.symmetry", True, f"task {spec.name} has no mirror images; allowed: false"))
    if not all(math.isfinite(bound) for bound in (*spec.action_low, *spec.action_high)):
        problems.append(UserError("task", spec.name, "allowed: a task whose actions have finite limits"))
    if problems:
        raise UserErrors(problems)
