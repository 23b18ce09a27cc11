"""FlashSAC: soft actor-critic on networks of bounded norm, with few updates on large batches (arXiv:2604.04539)."""

import copy
import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from unilab_fabric.checkpoints import Layouts
from unilab_fabric.errors import UserError, UserErrors
from unilab_fabric.learners import categorical, gaussian
from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.flash_sac.layers import Arithmetic, FlashNet
from unilab_fabric.learners.flash_sac.losses import (
    actor_loss,
    cosine_rate,
    critic_loss,
    entropy_of_std,
    least_optimistic,
)
from unilab_fabric.learners.flash_sac.noise import HeldNoise
from unilab_fabric.learners.flash_sac.rewards import RewardScale
from unilab_fabric.learners.kernels import load_kernels
from unilab_fabric.learners.learner import Batch
from unilab_fabric.learners.skips import SkippedSteps
from unilab_fabric.learners.soft import soft_bellman, temperature_gradient
from unilab_fabric.learners.symmetry import MirrorHalf
from unilab_fabric.parallel.flat import FlatAdamW, FlatParameters
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

LOG_STD_MIN = -10.0
LOG_STD_MAX = 2.0
_BETAS = (0.9, 0.999)

CRITIC_METRICS = (
    "Loss/critic",
    "Loss/grad_norm_critic",
    "Policy/q_mean",
    "Policy/reward_scale",
    "Loss/learning_rate",
)
ACTOR_METRICS = ("Loss/actor", "Loss/grad_norm_actor", "Policy/mean_std", "Policy/entropy", "Policy/temperature")


class FlashActor(nn.Module):
    """Actions from actor observations, in the environment's units; n is the number of actions."""

    scale: Tensor
    offset: Tensor

    def __init__(self, config: FlashSAC, spec: TaskSpec) -> None:
        super().__init__()
        self.net = FlashNet(1, spec.actor_size, config.actor_width, config.blocks, 2 * spec.action_size)
        low, high = torch.tensor(spec.action_low), torch.tensor(spec.action_high)
        self.register_buffer("scale", (high - low) / 2)
        self.register_buffer("offset", (high + low) / 2)

    def forward(self, observation: Tensor) -> Tensor:
        """The deterministic action, (B, observation) -> (B, n), with running statistics and in float32."""
        (head,) = self.net(observation)
        action: Tensor = head.chunk(2, dim=-1)[0].tanh() * self.scale + self.offset
        return action

    def sample(self, head: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Actions for standard normal noise, log-density and std: (B, n), (B,), (B, n).

        The density is that of the action before its scale, in -1 to 1, as the target entropy is.
        """
        squashed, log_prob, std = gaussian.squash(head, noise, LOG_STD_MIN, LOG_STD_MAX)
        return squashed * self.scale + self.offset, log_prob, std


class FlashSACLearner:
    """One rank's FlashSAC; see docs/learners.md. An update has one collective for the critics and one for the actor.

    In the tail of each gradient ride the marks of ranks whose part is not finite and the statistics of the batches that
    went through the BatchNorms, in the actor's the temperature's gradient too. A rank normalises with its own batch;
    the running statistics follow the batches of all ranks, so they stay the same everywhere.
    """

    metric_names: tuple[str, ...] = (*CRITIC_METRICS, *ACTOR_METRICS)
    generators: Mapping[str, torch.Generator]
    replicated: Mapping[str, Tensor]
    local: Mapping[str, Tensor]
    layouts: Layouts

    def __init__(
        self,
        config: FlashSAC,
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
        self._arithmetic = _choose_arithmetic(device, precision, config.kernels)
        self._target_entropy = entropy_of_std(spec.action_size, config.target_std)
        self._horizon = max(total_updates, 1)
        self._range = (-config.max_return, config.max_return)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.actor = FlashActor(config, spec).to(device)
            inputs = spec.critic_size + spec.action_size
            self.critic = FlashNet(2, inputs, config.critic_width, config.blocks, config.atoms).to(device)
        self.target = copy.deepcopy(self.critic)
        self.skipped = SkippedSteps(("critic", "actor"), ranks, device)
        self._flatten()
        self.log_temperature = torch.full((1,), math.log(config.temperature), device=device)

        self.critic_adam = _adam(self.critic_flat.values, self.critic_flat.gradient)
        self.actor_adam = _adam(self.actor_flat.values, self.actor_flat.gradient)
        self.temperature_adam = _adam(self.log_temperature, self._temperature_gradient)
        self._updates = torch.zeros((), dtype=torch.int64, device=device)
        self._mirror_half = MirrorHalf(spec.mirrors, device) if config.symmetry and spec.mirrors else None
        self._generator = torch.Generator(device).manual_seed(seed)
        self.generators = {"noise": self._generator}
        self._held = HeldNoise(
            spec.num_envs,
            spec.action_size,
            exponent=config.noise_exponent,
            longest=config.noise_longest,
            generator=self._generator,
        )
        self._rewards = RewardScale(spec.num_envs, config.discount, config.max_return, ranks, device)
        self.metrics = torch.zeros(len(self.metric_names), 2, dtype=torch.float64, device=device)
        self.replicated = self._replicated()
        self.local = {**self._rewards.local(), **self._held.local()}
        self.layouts = {"critic": self.critic_flat.layout, "actor": self.actor_flat.layout}

    def _flatten(self) -> None:
        """Moves parameters into flat tensors and gives each thing in the tails its place."""
        marks, critic, actor = self.skipped.floats, 3 * self.critic.channels, 3 * self.actor.net.channels
        self.actor_flat: FlatParameters = self.actor.net.flatten(tail=1 + marks + actor)
        self.critic_flat: FlatParameters = self.critic.flatten(tail=marks + 2 * critic)
        self.target_flat: FlatParameters = self.target.flatten()
        self._temperature_gradient, self._actor_marks, own = torch.split(self.actor_flat.tail, [1, marks, actor])
        self._actor_batch = own.view(3, -1)
        self._critic_marks, online, target = torch.split(self.critic_flat.tail, [marks, critic, critic])
        self._critic_batch, self._target_batch = online.view(3, -1), target.view(3, -1)

    def _replicated(self) -> dict[str, Tensor]:
        return {
            "critic": self.critic_flat.values,
            "actor": self.actor_flat.values,
            "target_critic": self.target_flat.values,
            "critic/batch_norm": self.critic.running,
            "actor/batch_norm": self.actor.net.running,
            "target_critic/batch_norm": self.target.running,
            "log_temperature": self.log_temperature,
            **self.critic_adam.replicated("critic"),
            **self.actor_adam.replicated("actor"),
            **self.temperature_adam.replicated("log_temperature"),
            **self._rewards.replicated(),
            "updates": self._updates,
            **self.skipped.replicated(),
        }

    @torch.no_grad()
    def act(self, observation: Tensor) -> Tensor:
        """Actions for (num_envs, actor observation), in the environment's units: uniform until learning has begun."""
        (head,) = self.actor.net(observation, self._arithmetic)
        action, _, _ = self.actor.sample(head, self._held.next())
        uniform = torch.empty_like(action).uniform_(-1.0, 1.0, generator=self._generator)
        return torch.where(self._updates == 0, uniform * self.actor.scale + self.actor.offset, action)

    def observe(self, reward: Tensor, ended: Tensor) -> None:
        """Takes note of one tick: rewards (num_envs,), and the environments (K,) whose episodes it ended."""
        self._rewards.observe(reward, ended)

    def update(self, batch: Batch, index: int) -> None:
        """Actor and temperature at every `actor_every`th update, then the critics and their targets."""
        if index % self.updates_per_tick == 0:
            self._rewards.merge()
        if self._mirror_half is not None:
            batch = self._mirror_half(batch)
        if index % self.config.actor_every == 0:
            self._update_actor(batch)
        self._update_critics(batch)
        self._updates += 1

    def policy(self) -> FlashActor:
        """The deterministic policy, BatchNorm statistics inside: (n, actor observation) -> (n, actions)."""
        return self.actor

    def _update_actor(self, batch: Batch) -> None:
        rows = batch.reward.shape[0]
        temperature = self.log_temperature.exp()
        self.actor_flat.zero_gradient()
        both = torch.cat([batch.actor, batch.next_actor])  # so that the statistics are those of the critics' batch
        (head,) = self.actor.net(both, self._arithmetic, batch=self._actor_batch)
        action, log_prob, std = self.actor.sample(head[:rows], self._standard_normal(batch.actor))
        with self.critic_flat.frozen():
            logits = self.critic(torch.cat([batch.critic, action], dim=1), self._arithmetic)
        _, value = least_optimistic(logits, *self._range)
        loss = actor_loss(log_prob, value, temperature)
        loss.backward()  # type: ignore[no-untyped-call]
        log_prob = log_prob.detach()
        self._temperature_gradient.copy_(temperature_gradient(log_prob, temperature, self._target_entropy))
        self.skipped.mark(self._actor_marks, self.actor_flat.reduced)
        self.ranks.mean_gradient_(self.actor_flat, "actor")

        kept, norm = self._verdict(self.actor_flat)
        self.skipped.count("actor", kept, self._actor_marks)
        skip = (~kept).float()
        self.actor_adam.step(self._rate(self.actor_adam), skip)
        self.temperature_adam.step(self._rate(self.temperature_adam), skip)
        self.actor.net.project()
        self.actor.net.follow(self._actor_batch, 2 * rows * self.ranks.world_size, kept)
        values = [loss, norm, std.mean(), -log_prob.mean(), temperature.squeeze()]
        self._count(ACTOR_METRICS, kept, values)

    def _update_critics(self, batch: Batch) -> None:
        rows = batch.reward.shape[0]
        self.critic_flat.zero_gradient()
        with torch.no_grad():
            (head,) = self.actor.net(batch.next_actor, self._arithmetic)
            next_action, next_log_prob, _ = self.actor.sample(head, self._standard_normal(batch.next_actor))
            now = torch.cat([batch.critic, batch.action], dim=1)
            both = torch.cat([now, torch.cat([batch.next_critic, next_action], dim=1)])
            next_logits = self.target(both, self._arithmetic, batch=self._target_batch)
            following, _ = least_optimistic([own[rows:] for own in next_logits], *self._range)
            reward = batch.reward / self._rewards.scale()
            temperature = self.log_temperature.exp()
            soft_reward, bootstrap = soft_bellman(reward, batch.terminated, batch.discount, next_log_prob, temperature)
            target = categorical.project(following, soft_reward, bootstrap, *self._range)
        logits = [own[:rows] for own in self.critic(both, self._arithmetic, batch=self._critic_batch)]
        loss = critic_loss(logits, target)
        loss.backward()  # type: ignore[no-untyped-call]
        self.skipped.mark(self._critic_marks, self.critic_flat.reduced)
        self.ranks.mean_gradient_(self.critic_flat, "critic")

        kept, norm = self._verdict(self.critic_flat)
        self.skipped.count("critic", kept, self._critic_marks)
        rate = self._rate(self.critic_adam)
        self.critic_adam.step(rate, (~kept).float())
        self.critic.project()
        self.critic.follow(self._critic_batch, 2 * rows * self.ranks.world_size, kept)
        self.target.follow(self._target_batch, 2 * rows * self.ranks.world_size, kept)
        self.target_flat.values.lerp_(self.critic_flat.values, self.config.tau * kept)
        with torch.no_grad():
            value = torch.stack([categorical.expected_value(own, *self._range) for own in logits]).mean()
        self._count(CRITIC_METRICS, kept, [loss, norm, value, self._rewards.scale(), rate])

    def _verdict(self, flat: FlatParameters) -> tuple[Tensor, Tensor]:
        """Whether all that was reduced is finite, the same on every rank, and the gradient's norm."""
        norm = torch.linalg.vector_norm(flat.gradient)
        return norm + flat.tail.abs().max() < math.inf, norm

    def _rate(self, adam: FlatAdamW) -> Tensor:
        """The learning rate by the optimiser's own number of steps."""
        config = self.config
        warm_up = round(config.warm_up_fraction * self._horizon)
        return cosine_rate(adam.steps, config.learning_rate, config.final_learning_rate, warm_up, self._horizon)

    @torch.no_grad()
    def _count(self, names: tuple[str, ...], kept: Tensor, values: list[Tensor]) -> None:
        """Adds one report of each to `metrics`; a skipped step reports nothing."""
        first = self.metric_names.index(names[0])
        sums, counts = self.metrics[first : first + len(names)].unbind(1)
        sums += torch.where(kept, torch.stack(values), 0.0)
        counts += kept

    def _standard_normal(self, observation: Tensor) -> Tensor:
        size = (observation.shape[0], self.actor.scale.shape[0])
        return torch.randn(size, generator=self._generator, device=observation.device)


def _choose_arithmetic(device: torch.device, precision: str, kernels: Literal["auto", "off"]) -> Arithmetic:
    dtype = torch.bfloat16 if precision == "bf16-mixed" else torch.float32
    return Arithmetic(dtype, load_kernels(dtype) if device.type == "cpu" and kernels == "auto" else None)


def _adam(values: Tensor, gradient: Tensor) -> FlatAdamW:
    """Adam with PyTorch's defaults: AdamW without decay."""
    return FlatAdamW(values, gradient, betas=_BETAS)


def _check_task(config: FlashSAC, spec: TaskSpec) -> None:
    problems = []
    if config.symmetry and spec.mirrors is None:
        problems.append(UserError("learner.symmetry", True, f"task {spec.name} has no mirror images; allowed: false"))
    if not all(math.isfinite(bound) for bound in (*spec.action_low, *spec.action_high)):
        problems.append(UserError("task", spec.name, "allowed: a task whose actions have finite limits"))
    if problems:
        raise UserErrors(problems)
