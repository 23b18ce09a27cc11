"""FlashSAC as one writes it first: float32, a module per layer and critic, torch's BatchNorm1d and RMSNorm, fused Adam
over the list of parameters, every weight brought back to its norm by itself."""

import copy
import math

import torch
from torch import Tensor, nn

from unilab_fabric.learners.flash_sac.config import FlashSAC
from unilab_fabric.learners.learner import Batch
from unilab_fabric.spaces import TaskSpec


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Linear(width, 4 * width, bias=False)
        self.wide_norm = nn.BatchNorm1d(4 * width, momentum=0.01)
        self.narrow = nn.Linear(4 * width, width, bias=False)
        self.narrow_norm = nn.BatchNorm1d(width, momentum=0.01)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.wide_norm(self.wide(x)))
        return x + torch.relu(self.narrow_norm(self.narrow(y)))


def _network(inputs: int, width: int, blocks: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.BatchNorm1d(inputs, momentum=0.01),
        nn.Linear(inputs, width, bias=False),
        *[_Block(width) for _ in range(blocks)],
        nn.RMSNorm(width, eps=1e-6),
        nn.Linear(width, outputs),
    )


@torch.no_grad()
def _project(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.div_(module.weight.norm(dim=1, keepdim=True) + 1e-8)
        elif isinstance(module, nn.BatchNorm1d):
            factor = (module.num_features / (module.weight.square().sum() + module.bias.square().sum() + 1e-8)).sqrt()
            module.weight.mul_(factor)
            module.bias.mul_(factor)
        elif isinstance(module, nn.RMSNorm) and module.weight is not None:
            module.weight.mul_((module.weight.numel() / (module.weight.square().sum() + 1e-8)).sqrt())


class PlainFlashSAC:
    """Does the work of a FlashSACLearner with `actor_every` 1: both updates, projections, target networks, metrics."""

    def __init__(self, spec: TaskSpec, config: FlashSAC, reward_scale: float) -> None:
        self.config = config
        self.reward_scale = reward_scale
        self.atoms = torch.linspace(-config.max_return, config.max_return, config.atoms)
        self.step = 2 * config.max_return / (config.atoms - 1)
        self.actor = _network(spec.actor_size, config.actor_width, config.blocks, 2 * spec.action_size)
        inputs = spec.critic_size + spec.action_size
        self.critics = nn.ModuleList(
            _network(inputs, config.critic_width, config.blocks, config.atoms) for _ in range(2)
        )
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.log_temperature = torch.tensor(math.log(config.temperature), requires_grad=True)
        self.target_entropy = 0.5 * spec.action_size * math.log(2 * math.pi * math.e * config.target_std**2)
        self.actor_parameters: list[Tensor] = list(self.actor.parameters())
        self.critic_parameters: list[Tensor] = list(self.critics.parameters())
        self.target_parameters: list[Tensor] = list(self.targets.parameters())
        self.actor_adam = torch.optim.Adam(self.actor_parameters, lr=config.learning_rate, fused=True)
        self.critic_adam = torch.optim.Adam(self.critic_parameters, lr=config.learning_rate, fused=True)
        self.temperature_adam = torch.optim.Adam([self.log_temperature], lr=config.learning_rate, fused=True)
        self.metrics = torch.zeros(8)

    def sample(self, head: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, raw = head.chunk(2, dim=-1)
        log_std = -10.0 + 6.0 * (raw.tanh() + 1.0)
        std = log_std.exp()
        noise = torch.randn_like(mean)
        action = (mean + std * noise).tanh()
        log_prob = -0.5 * noise.square() - log_std - 0.5 * math.log(2 * math.pi) - (1.0 - action.square() + 1e-6).log()
        return action, log_prob.sum(-1), std

    def update(self, batch: Batch) -> None:
        self._update_actor(batch)
        self._update_critics(batch)

    def _update_actor(self, batch: Batch) -> None:
        rows = len(batch.reward)
        temperature = self.log_temperature.detach().exp()
        head = self.actor.train()(torch.cat([batch.actor, batch.next_actor]))[:rows]
        action, log_prob, std = self.sample(head)
        self.critics.eval().requires_grad_(False)
        inputs = torch.cat([batch.critic, action], dim=1)
        value = torch.minimum(*[critic(inputs).softmax(-1) @ self.atoms for critic in self.critics])
        self.critics.requires_grad_(True)
        loss = (temperature * log_prob - value).mean()
        self.actor_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in self.actor_parameters if p.grad is not None])
        self.actor_adam.step()
        _project(self.actor)
        temperature_loss = -self.log_temperature.exp() * (log_prob.detach().mean() + self.target_entropy)
        self.temperature_adam.zero_grad()
        temperature_loss.backward()  # type: ignore[no-untyped-call]
        self.temperature_adam.step()
        self.metrics[:5] += torch.stack(
            [loss.detach(), norm, std.detach().mean(), -log_prob.detach().mean(), temperature]
        )

    def _update_critics(self, batch: Batch) -> None:
        rows = len(batch.reward)
        with torch.no_grad():
            action, log_prob, _ = self.sample(self.actor.eval()(batch.next_actor))
            now = torch.cat([batch.critic, batch.action], dim=1)
            both = torch.cat([now, torch.cat([batch.next_critic, action], dim=1)])
            logits = torch.stack([target.train()(both)[rows:] for target in self.targets])
            member = (logits.softmax(-1) @ self.atoms).argmin(0)
            following = logits[member, torch.arange(rows)].softmax(-1)
            bootstrap = batch.discount * ~batch.terminated
            soft_reward = batch.reward / self.reward_scale - bootstrap * self.log_temperature.exp() * log_prob
            target = self._moved(following, soft_reward, bootstrap)
        logits_now = [critic.train()(both)[:rows] for critic in self.critics]
        loss = torch.stack([-(target * own.log_softmax(-1)).sum(-1).mean() for own in logits_now]).mean()
        self.critic_adam.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.get_total_norm([p.grad for p in self.critic_parameters if p.grad is not None])
        self.critic_adam.step()
        for critic in self.critics:
            _project(critic)
        with torch.no_grad():
            torch._foreach_lerp_(self.target_parameters, self.critic_parameters, self.config.tau)
            value = torch.stack([(own.softmax(-1) @ self.atoms).mean() for own in logits_now]).mean()
            self.metrics[5:] += torch.stack([loss, norm, value])

    def _moved(self, probabilities: Tensor, soft_reward: Tensor, bootstrap: Tensor) -> Tensor:
        largest = self.config.max_return
        moved = (soft_reward[:, None] + bootstrap[:, None] * self.atoms).clamp(-largest, largest)
        position = (moved + largest) / self.step
        lower = position.long().clamp(max=self.config.atoms - 1)
        share = position - lower
        projected = torch.zeros_like(probabilities)
        projected.scatter_add_(-1, lower, probabilities * (1.0 - share))
        return projected.scatter_add_(-1, (lower + 1).clamp(max=self.config.atoms - 1), probabilities * share)
