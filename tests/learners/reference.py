"""FastSAC written plainly: float64, one module per layer and critic, one optimiser per network, no flat tensors."""

import copy
import math

import torch
from torch import nn


def perceptron(inputs, hidden, outputs):
    layers = []
    for a, b in zip([inputs, *hidden], hidden, strict=False):
        layers += [nn.Linear(a, b), nn.LayerNorm(b), nn.SiLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], outputs)).double()


def load(plain, mlp, member):
    """Copies one member of our batched network into a plain one."""
    linears = [*mlp.linears, mlp.head]
    for ours, theirs in zip(linears, [m for m in plain if isinstance(m, nn.Linear)], strict=True):
        theirs.weight.data.copy_(ours.weight[member])
        theirs.bias.data.copy_(ours.bias[member])
    for ours, theirs in zip(mlp.norms, [m for m in plain if isinstance(m, nn.LayerNorm)], strict=True):
        theirs.weight.data.copy_(ours.weight[member])
        theirs.bias.data.copy_(ours.bias[member])


def difference(plain, mlp, member):
    """The largest difference between a plain network and one member of ours."""
    other = copy.deepcopy(plain)
    load(other, mlp, member)
    pairs = zip(plain.parameters(), other.parameters(), strict=True)
    return max((a - b).abs().max().item() for a, b in pairs)


class Statistics:
    """Mean and variance of all the rows ever shown."""

    def __init__(self, size):
        self.rows = torch.zeros(0, size, dtype=torch.float64)

    def __call__(self, x):
        if not len(self.rows):
            return x / 1.01
        return (x - self.rows.mean(0)) / (self.rows.std(0, unbiased=False) + 0.01)


class PlainFastSAC:
    """Starts from a FastSACLearner's parameters and noise; `update` takes the same batches."""

    def __init__(self, learner, config, spec, total_updates):
        self.config, self.spec, self.total = config, spec, total_updates
        n = spec.action_size
        low, high = torch.tensor(spec.action_low).double(), torch.tensor(spec.action_high).double()
        self.scale, self.offset = (high - low) / 2, (high + low) / 2
        self.atoms = torch.linspace(config.v_min, config.v_max, config.atoms, dtype=torch.float64)
        self.actor = perceptron(spec.actor_size, config.actor_hidden, 2 * n)
        load(self.actor, learner.actor.net, 0)
        members = range(config.num_critics)
        self.critics = [perceptron(spec.critic_size + n, config.critic_hidden, config.atoms) for _ in members]
        for member, critic in enumerate(self.critics):
            load(critic, learner.critic.net, member)
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = torch.tensor(math.log(config.temperature), dtype=torch.float64, requires_grad=True)
        settings = {"betas": config.betas, "eps": 1e-8}
        decay = config.weight_decay
        self.actor_adam = torch.optim.AdamW(self.actor.parameters(), weight_decay=decay, **settings)
        self.critic_adams = [torch.optim.AdamW(c.parameters(), weight_decay=decay, **settings) for c in self.critics]
        self.temperature_adam = torch.optim.AdamW([self.log_temperature], weight_decay=0.0, **settings)
        self.normalise = config.normalize_observations
        self.actor_statistics, self.critic_statistics = Statistics(spec.actor_size), Statistics(spec.critic_size)
        self.noise = torch.Generator().set_state(learner.generators["noise"].get_state())
        self.updates = 0

    def normal(self, rows):
        return torch.randn(rows, self.spec.action_size, generator=self.noise).double()

    def actor_input(self, observation):
        return self.actor_statistics(observation) if self.normalise else observation

    def critic_input(self, observation):
        return self.critic_statistics(observation) if self.normalise else observation

    def sample(self, observation):
        mean, raw = self.actor(self.actor_input(observation)).chunk(2, dim=-1)
        std = torch.exp(-5.0 + 2.5 * (torch.tanh(raw) + 1.0))
        u = mean + std * self.normal(len(observation))
        gaussian = torch.distributions.Normal(mean, std).log_prob(u)
        log_prob = (gaussian - torch.log(1.0 - torch.tanh(u) ** 2) - torch.log(self.scale)).sum(-1)
        return torch.tanh(u) * self.scale + self.offset, log_prob

    def critic_logits(self, critic, observation, action):
        return critic(torch.cat([self.critic_input(observation), action], -1))

    def projected(self, probabilities, moved):
        """Row by row and atom by atom, as the paper writes it."""
        delta = (self.config.v_max - self.config.v_min) / (self.config.atoms - 1)
        result = torch.zeros_like(probabilities)
        for row in range(len(probabilities)):
            for k in range(self.config.atoms):
                b = (moved[row, k].item() - self.config.v_min) / delta
                low = min(math.floor(b), self.config.atoms - 1)
                result[row, low] += probabilities[row, k] * (1 - (b - low))
                if b > low:
                    result[row, low + 1] += probabilities[row, k] * (b - low)
        return result

    def set_learning_rates(self):
        config = self.config
        share = 1.0 - (1.0 - config.final_lr_fraction) * min(self.updates / self.total, 1.0)
        for adam, start in [
            (self.actor_adam, config.actor_learning_rate),
            (self.temperature_adam, config.temperature_learning_rate),
            *[(adam, config.critic_learning_rate) for adam in self.critic_adams],
        ]:
            adam.param_groups[0]["lr"] = start * share

    def clip(self, parameters):
        if self.config.max_grad_norm > 0:
            nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)

    def update(self, batch, index):
        config = self.config
        b = {name: value.double() for name, value in vars(batch).items()}
        self.set_learning_rates()
        temperature = self.log_temperature.detach().exp()

        with torch.no_grad():
            action, log_prob = self.sample(b["next_actor"])
            bootstrap = b["discount"] * (1.0 - b["terminated"])
            soft = b["reward"] - bootstrap * temperature * log_prob
            moved = (soft[:, None] + bootstrap[:, None] * self.atoms).clamp(config.v_min, config.v_max)
            targets = [
                self.projected(self.critic_logits(target, b["next_critic"], action).softmax(-1), moved)
                for target in self.targets
            ]
        loss = 0.0
        for critic, target in zip(self.critics, targets, strict=True):
            logits = self.critic_logits(critic, b["critic"], b["action"])
            loss = loss - (target * logits.log_softmax(-1)).sum(-1).mean()
        for adam in self.critic_adams:
            adam.zero_grad()
        loss.backward()
        self.clip([p for critic in self.critics for p in critic.parameters()])
        for adam in self.critic_adams:
            adam.step()

        target_entropy = -config.target_entropy_ratio * self.spec.action_size
        self.temperature_adam.zero_grad()
        (-self.log_temperature.exp() * (log_prob + target_entropy)).mean().backward()
        self.temperature_adam.step()
        if index % config.updates_per_tick == 0:
            self.actor_statistics.rows = torch.cat([self.actor_statistics.rows, b["actor"]])
            self.critic_statistics.rows = torch.cat([self.critic_statistics.rows, b["critic"]])
        with torch.no_grad():
            for critic, target in zip(self.critics, self.targets, strict=True):
                for p, t in zip(critic.parameters(), target.parameters(), strict=True):
                    t.mul_(1.0 - config.tau).add_(config.tau * p)

        if index % config.actor_every == 0:
            self.update_actor(b)
        self.updates += 1

    def update_actor(self, b):
        action, log_prob = self.sample(b["actor"])
        logits = [self.critic_logits(critic, b["critic"], action) for critic in self.critics]
        value = torch.stack([one.softmax(-1) @ self.atoms for one in logits]).mean(0)
        self.actor_adam.zero_grad()
        (self.log_temperature.detach().exp() * log_prob - value).mean().backward()
        self.clip(self.actor.parameters())
        self.actor_adam.step()
