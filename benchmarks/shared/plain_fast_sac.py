"""FastSAC as one writes it first: float32, one nn.Linear, nn.LayerNorm and nn.SiLU per layer and critic, fused AdamW
over the list of parameters."""

import copy
import math

import torch
from torch import Tensor, nn

from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.learner import Batch
from unilab_fabric.spaces import TaskSpec


class PlainFastSAC:
    """Does the work of a FastSACLearner: noise, projected targets, temperature, target networks, norms, metrics."""

    def __init__(self, spec: TaskSpec, config: FastSAC) -> None:
        self.config = config
        self.atoms = torch.linspace(config.v_min, config.v_max, config.atoms)
        self.step = (config.v_max - config.v_min) / (config.atoms - 1)
        self.actor = _perceptron(spec.actor_size, config.actor_hidden, 2 * spec.action_size)
        inputs = spec.critic_size + spec.action_size
        critics = [_perceptron(inputs, config.critic_hidden, config.atoms) for _ in range(config.num_critics)]
        self.critics = nn.ModuleList(critics)
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = torch.tensor(math.log(config.temperature), requires_grad=True)
        self.critic_parameters: list[Tensor] = list(self.critics.parameters())
        self.target_parameters: list[Tensor] = list(self.targets.parameters())
        self.actor_parameters: list[Tensor] = list(self.actor.parameters())
        self.critic_adam = self._adam(self.critic_parameters, config.critic_learning_rate)
        self.actor_adam = self._adam(self.actor_parameters, config.actor_learning_rate)
        self.temperature_adam = torch.optim.AdamW([self.log_temperature], lr=3e-4, weight_decay=0.0, fused=True)
        self.metrics = torch.zeros(9)

    def _adam(self, parameters: list[Tensor], lr: float) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            parameters, lr=lr, betas=self.config.betas, weight_decay=self.config.weight_decay, fused=True
        )

    def sample(self, observation: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, raw = self.actor(observation).chunk(2, dim=-1)
        log_std = -5.0 + 2.5 * (raw.tanh() + 1.0)
        std = log_std.exp()
        noise = torch.randn_like(mean)
        action = (mean + std * noise).tanh()
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - (1.0 - action.square() + 1e-6).log()
        return action, log_prob.sum(-1), std

    def update(self, batch: Batch) -> None:
        temperature = self.log_temperature.detach().exp()
        with torch.no_grad():
            action, log_prob, _ = self.sample(batch.next_actor)
            bootstrap = batch.discount * ~batch.terminated
            soft_reward = batch.reward - bootstrap * temperature * log_prob
            moved = (soft_reward[:, None] + bootstrap[:, None] * self.atoms).clamp(self.config.v_min, self.config.v_max)
            position = (moved - self.config.v_min) / self.step
            lower = position.floor().long()
            share = position - lower
            upper = (lower + 1).clamp(max=self.config.atoms - 1)
            following = torch.cat([batch.next_critic, action], dim=-1)
            targets = [self._project(target(following).softmax(-1), lower, upper, share) for target in self.targets]
        current = torch.cat([batch.critic, batch.action], dim=-1)
        logits = [critic(current) for critic in self.critics]
        losses = [-(t * own.log_softmax(-1)).sum(-1).mean() for t, own in zip(targets, logits, strict=True)]
        loss = torch.stack(losses).sum()
        self.critic_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in self.critic_parameters if p.grad is not None])
        self.critic_adam.step()

        temperature_loss = -(self.log_temperature.exp() * log_prob).mean()
        self.temperature_adam.zero_grad()
        temperature_loss.backward()  # type: ignore[no-untyped-call]
        self.temperature_adam.step()
        with torch.no_grad():
            values = torch.stack([(own.detach().softmax(-1) @ self.atoms).mean() for own in logits]).mean()
            self.metrics[:5] += torch.stack([loss.detach(), norm, -log_prob.mean(), temperature, values])

        self._update_actor(batch, temperature)
        with torch.no_grad():
            torch._foreach_lerp_(self.target_parameters, self.critic_parameters, self.config.tau)

    def _project(self, probabilities: Tensor, lower: Tensor, upper: Tensor, share: Tensor) -> Tensor:
        projected = torch.zeros_like(probabilities)
        projected.scatter_add_(-1, lower, probabilities * (1.0 - share))
        return projected.scatter_add_(-1, upper, probabilities * share)

    def _update_actor(self, batch: Batch, temperature: Tensor) -> None:
        action, log_prob, std = self.sample(batch.actor)
        inputs = torch.cat([batch.critic, action], dim=-1)
        self.critics.requires_grad_(False)
        value = torch.stack([critic(inputs).softmax(-1) @ self.atoms for critic in self.critics]).mean(0)
        self.critics.requires_grad_(True)
        loss = (temperature * log_prob - value).mean()
        self.actor_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in self.actor_parameters if p.grad is not None])
        self.actor_adam.step()
        self.metrics[5:8] += torch.stack([loss.detach(), norm, std.detach().mean()])


def _perceptron(inputs: int, hidden: tuple[int, ...], outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for a, b in zip((inputs, *hidden), hidden, strict=False):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs))
