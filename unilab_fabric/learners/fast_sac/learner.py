"""FastSAC: soft actor-critic with categorical critics, tuned for thousands of environments."""

import copy
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unilab_fabric.checkpoints import Layouts
from unilab_fabric.errors import UserError, UserErrors
from unilab_fabric.learners.actor import Actor
from unilab_fabric.learners.critic import CategoricalCritics
from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.fast_sac.losses import actor_loss
from unilab_fabric.learners.learner import Batch
from unilab_fabric.learners.operations import choose_operations
from unilab_fabric.learners.skips import SkippedSteps
from unilab_fabric.learners.soft import soft_bellman, temperature_gradient
from unilab_fabric.learners.symmetry import MirrorHalf
from unilab_fabric.parallel.flat import FlatAdamW, FlatParameters
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.parallel.statistics import RunningNormaliser, SharedMoments
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
    """One rank's FastSAC; see docs/learners.md. An update has one collective for the critics and one for the actor.

    What rides on the critics' collective, in the tail of their gradient: the temperature's gradient, a mark of each
    rank on whether its part is finite, and at the first update of a tick the moments of each rank's batch. The actor's
    carries marks too.
    """

    metric_names: tuple[str, ...] = (*CRITIC_METRICS, *ACTOR_METRICS)
    generators: Mapping[str, torch.Generator]
    replicated: Mapping[str, Tensor]
    layouts: Layouts

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
        self.updates_per_tick = config.updates_per_tick
        self.period = config.actor_every
        self.batch_size = config.batch_size
        self._operations = choose_operations(device, precision, config.kernels)
        self._target_entropy = -config.target_entropy_ratio * spec.action_size
        self._horizon = max(total_updates, 1)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = _build_actor(config, spec).to(device)
            self.critic = _build_critics(config, spec).to(device)
        self.target = copy.deepcopy(self.critic)
        self.target.normaliser = self.critic.normaliser
        normalisers = [
            module
            for module in (self.actor.normaliser, self.critic.normaliser)
            if isinstance(module, RunningNormaliser)
        ]
        self.skipped = SkippedSteps(("critic", "actor"), ranks, device)
        marks, moments = self.skipped.floats, ranks.world_size * SharedMoments.floats_per_rank(normalisers)
        self.actor_flat = self.actor.net.flatten(tail=marks)
        self.target_flat = self.target.net.flatten()
        self.critic_flat = self.critic.net.flatten(tail=1 + marks + moments)
        self.log_temperature = torch.full((1,), math.log(config.temperature), device=device)
        self._actor_marks = self.actor_flat.tail
        self._temperature_gradient, self._critic_marks, room = torch.split(self.critic_flat.tail, [1, marks, moments])
        self._moments = SharedMoments(normalisers, room, ranks) if normalisers else None

        self.critic_adam = self._adamw(self.critic_flat, config.weight_decay)
        self.actor_adam = self._adamw(self.actor_flat, config.weight_decay)
        self.temperature_adam = FlatAdamW(self.log_temperature, self._temperature_gradient, betas=config.betas)
        rates = [config.critic_learning_rate, config.temperature_learning_rate, config.actor_learning_rate]
        self._first_learning_rates = torch.tensor(rates, device=device)
        self._learning_rates = self._first_learning_rates.clone()
        self._critic_lr, self._temperature_lr, self._actor_lr = self._learning_rates.unbind()

        self._updates, self._acted_ticks = torch.zeros(2, dtype=torch.int64, device=device)
        self._mirror_half = MirrorHalf(spec.mirrors, device) if config.symmetry and spec.mirrors else None
        self._noise = torch.Generator(device).manual_seed(seed)
        self.generators = {"noise": self._noise}
        self.metrics = torch.zeros(len(self.metric_names), 2, dtype=torch.float64, device=device)
        self.replicated = self._replicated(normalisers)
        self.local: Mapping[str, Tensor] = {}
        self.layouts = {"critic": self.critic_flat.layout, "actor": self.actor_flat.layout}

    def _adamw(self, flat: FlatParameters, weight_decay: float) -> FlatAdamW:
        return FlatAdamW(flat.values, flat.gradient, betas=self.config.betas, weight_decay=weight_decay)

    def _replicated(self, normalisers: list[RunningNormaliser]) -> dict[str, Tensor]:
        state = {
            "critic": self.critic_flat.values,
            "actor": self.actor_flat.values,
            "target_critic": self.target_flat.values,
            "log_temperature": self.log_temperature,
            **self.critic_adam.replicated("critic"),
            **self.actor_adam.replicated("actor"),
            **self.temperature_adam.replicated("log_temperature"),
            "updates": self._updates,
            **self.skipped.replicated(),
            "acted_ticks": self._acted_ticks,
        }
        for name, module in zip(("actor", "critic"), normalisers, strict=False):
            state |= module.replicated(f"{name}/normaliser")
        return state

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """Sampled actions for (num_envs, actor observation), (num_envs, actions) in the environment's units."""
        action: Tensor
        action, _, _ = self.actor.sample(self._operations, observation, self._standard_normal(observation))
        if self.config.random_ticks > 0:
            uniform = torch.empty_like(action).uniform_(-1.0, 1.0, generator=self._noise)
            uniform = uniform * self.actor.scale + self.actor.offset
            action = torch.where(self._acted_ticks < self.config.random_ticks, uniform, action)
        self._acted_ticks += 1
        return action

    def observe(self, reward: Tensor, ended: Tensor) -> None:
        """Does nothing: rewards are taken as they are."""

    def update(self, batch: Batch, index: int) -> None:
        """Critics and temperature, the actor at every `actor_every`th update, and the target critics."""
        if self._mirror_half is not None:
            batch = self._mirror_half(batch)
        self._schedule_learning_rates()
        self._update_critics(batch, first_of_tick=index % self.updates_per_tick == 0)
        if index % self.config.actor_every == 0:
            self._update_actor(batch)
        self._updates += 1

    def policy(self) -> Actor:
        """The deterministic policy, normaliser inside: (n, actor observation) -> (n, actions)."""
        return self.actor

    def _update_critics(self, batch: Batch, first_of_tick: bool) -> None:
        temperature = self.log_temperature.exp()
        with torch.no_grad():
            noise = self._standard_normal(batch.next_actor)
            next_action, next_log_prob, _ = self.actor.sample(self._operations, batch.next_actor, noise)
            next_logits = self.target.logits(self._operations, batch.next_critic, next_action)
        soft_reward, bootstrap = soft_bellman(
            batch.reward, batch.terminated, batch.discount, next_log_prob, temperature
        )
        logits = self.critic.logits(self._operations, batch.critic, batch.action)
        # every critic has its own target: no minimum over critics
        losses, values = zip(
            *(
                self._operations.categorical_loss(
                    own, following, soft_reward, bootstrap, self.config.v_min, self.config.v_max
                )
                for own, following in zip(logits, next_logits, strict=True)
            ),
            strict=True,
        )
        loss = torch.stack(losses).sum()

        self.critic_flat.zero_gradient()
        loss.backward()  # type: ignore[no-untyped-call]
        self._temperature_gradient.copy_(temperature_gradient(next_log_prob, temperature, self._target_entropy))
        if first_of_tick and self._moments is not None:
            self._moments.write([batch.actor, batch.critic])
        self.skipped.mark(self._critic_marks, self.critic_flat.reduced)
        self.ranks.mean_gradient_(self.critic_flat, "critic")

        norm = self.critic_flat.clip_norm_(self.config.max_grad_norm)
        # one verdict for all that was reduced together, from the reduced values: the same on every rank
        kept = norm + torch.linalg.vector_norm(self.critic_flat.tail, ord=1) < math.inf
        self.skipped.count("critic", kept, self._critic_marks)
        skip = (~kept).float()
        self.critic_adam.step(self._critic_lr, skip)
        self.temperature_adam.step(self._temperature_lr, skip)
        if first_of_tick and self._moments is not None:
            self._moments.merge(batch.reward.shape[0], kept)
        self.target_flat.values.lerp_(self.critic_flat.values, self.config.tau * kept)
        entropy, value = -next_log_prob.mean(), torch.stack(values).mean()
        self._count(CRITIC_METRICS, kept, [loss, norm, entropy, temperature.squeeze(), value, self._critic_lr])

    def _update_actor(self, batch: Batch) -> None:
        noise = self._standard_normal(batch.actor)
        action, log_prob, std = self.actor.sample(self._operations, batch.actor, noise)
        with self.critic_flat.frozen():
            logits = self.critic.logits(self._operations, batch.critic, action)
        values = [self._operations.expected_value(own, self.config.v_min, self.config.v_max) for own in logits]
        loss = actor_loss(log_prob, values, self.log_temperature.exp())

        self.actor_flat.zero_gradient()
        loss.backward()  # type: ignore[no-untyped-call]
        self.skipped.mark(self._actor_marks, self.actor_flat.reduced)
        self.ranks.mean_gradient_(self.actor_flat, "actor")

        norm = self.actor_flat.clip_norm_(self.config.max_grad_norm)
        kept = norm < math.inf
        self.skipped.count("actor", kept, self._actor_marks)
        self.actor_adam.step(self._actor_lr, (~kept).float())
        self._count(ACTOR_METRICS, kept, [loss, norm, std.mean()])

    def _schedule_learning_rates(self) -> None:
        if self.config.final_lr_fraction < 1.0:
            slope = (1.0 - self.config.final_lr_fraction) / self._horizon
            fraction = (1.0 - slope * self._updates).clamp(min=self.config.final_lr_fraction)
            torch.mul(self._first_learning_rates, fraction, out=self._learning_rates)

    @torch.no_grad()
    def _count(self, names: tuple[str, ...], kept: Tensor, values: list[Tensor]) -> None:
        """Adds one report of each to `metrics`; a skipped step reports nothing."""
        first = self.metric_names.index(names[0])
        sums, counts = self.metrics[first : first + len(names)].unbind(1)
        sums += torch.where(kept, torch.stack(values), 0.0)
        counts += kept

    def _standard_normal(self, observation: Tensor) -> Tensor:
        size = (observation.shape[0], self.actor.scale.shape[0])
        return torch.randn(size, generator=self._noise, device=observation.device)


def _build_actor(config: FastSAC, spec: TaskSpec) -> Actor:
    return Actor(spec.actor_size, config.actor_hidden, spec.action_low, spec.action_high, config.normalize_observations)


def _build_critics(config: FastSAC, spec: TaskSpec) -> CategoricalCritics:
    return CategoricalCritics(
        config.num_critics,
        spec.critic_size,
        spec.action_size,
        config.critic_hidden,
        config.atoms,
        RunningNormaliser(spec.critic_size) if config.normalize_observations else nn.Identity(),
    )


def _check_task(config: FastSAC, spec: TaskSpec) -> None:
    problems = []
    if config.symmetry and spec.mirrors is None:
        problems.append(UserError("learner.symmetry", True, f"task {spec.name} has no mirror images; allowed: false"))
    if not all(math.isfinite(bound) for bound in (*spec.action_low, *spec.action_high)):
        problems.append(UserError("task", spec.name, "allowed: a task whose actions have finite limits"))
    if problems:
        raise UserErrors(problems)
