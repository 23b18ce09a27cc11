"""FlashSAC written plainly: float64, torch's own BatchNorm1d, one module per layer and critic, no flat tensors."""

import copy
import math

import torch
from torch import nn


class PlainNet(nn.Module):
    """One member of a FlashNet."""

    def __init__(self, net, member):
        super().__init__()

        def linear(ours):
            layer = nn.Linear(ours.weight.shape[2], ours.weight.shape[1], bias=False).double()
            layer.weight.data.copy_(ours.weight[member])
            return layer

        def norm(ours):
            layer = nn.BatchNorm1d(ours.width, momentum=0.01, eps=1e-5).double()
            layer.weight.data.copy_(ours.weight[member])
            layer.bias.data.copy_(ours.bias[member])
            return layer

        self.input_norm, self.embedder = norm(net.input_norm), linear(net.embedder)
        self.wide, self.narrow = nn.ModuleList(map(linear, net.wide)), nn.ModuleList(map(linear, net.narrow))
        self.wide_norms = nn.ModuleList(map(norm, net.wide_norms))
        self.narrow_norms = nn.ModuleList(map(norm, net.narrow_norms))
        self.output_weight = nn.Parameter(net.output_norm.weight[member].detach().double().clone())
        self.head = linear(net.head)
        self.head_bias = nn.Parameter(net.head_bias[member].detach().double().clone())

    def forward(self, x):
        x = self.embedder(self.input_norm(x))
        for wide, wide_norm, narrow, narrow_norm in zip(
            self.wide, self.wide_norms, self.narrow, self.narrow_norms, strict=True
        ):
            x = x + torch.relu(narrow_norm(narrow(torch.relu(wide_norm(wide(x))))))
        return self.head(x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6) * self.output_weight) + self.head_bias

    @torch.no_grad()
    def project(self):
        for module in self.modules():
            if isinstance(module, nn.Linear):
                for row in module.weight:
                    row /= row.norm()
            if isinstance(module, nn.BatchNorm1d):
                factor = math.sqrt(len(module.weight) / float((module.weight**2).sum() + (module.bias**2).sum()))
                module.weight *= factor
                module.bias *= factor
        self.output_weight *= math.sqrt(len(self.output_weight)) / self.output_weight.norm()

    def statistics(self):
        """Running mean and variance of all BatchNorms, in the order of FlashNet."""
        norms = [self.input_norm]
        for pair in zip(self.wide_norms, self.narrow_norms, strict=True):
            norms += pair
        return torch.stack([torch.cat([n.running_mean for n in norms]), torch.cat([n.running_var for n in norms])])


class PlainFlashSAC:
    """Starts from a FlashSACLearner's parameters and noise; `update` takes the same batches."""

    def __init__(self, learner, config, spec, total_updates):
        self.config, self.spec, self.total = config, spec, total_updates
        low, high = torch.tensor(spec.action_low).double(), torch.tensor(spec.action_high).double()
        self.scale, self.offset = (high - low) / 2, (high + low) / 2
        self.actor = PlainNet(learner.actor.net, 0)
        self.critics = [PlainNet(learner.critic, member) for member in range(2)]
        self.targets = copy.deepcopy(self.critics)
        self.log_temperature = torch.tensor(math.log(config.temperature), dtype=torch.float64, requires_grad=True)
        self.adams = {
            "actor": torch.optim.Adam(self.actor.parameters()),
            "critic": torch.optim.Adam([p for critic in self.critics for p in critic.parameters()]),
            "temperature": torch.optim.Adam([self.log_temperature]),
        }
        self.steps = dict.fromkeys(self.adams, 0)
        self.noise = torch.Generator().set_state(learner.generators["noise"].get_state())
        self.sums, self.seen = torch.zeros(spec.num_envs, dtype=torch.float64), []
        self.atoms = torch.linspace(-config.max_return, config.max_return, config.atoms, dtype=torch.float64)

    def observe(self, reward, ended):
        for env in range(len(self.sums)):
            carried = 0.0 if env in ended.tolist() else self.config.discount * self.sums[env]
            self.sums[env] = carried + reward[env].double()
        self.seen.append(self.sums.clone())

    def reward_scale(self):
        seen = torch.cat(self.seen)
        return max(math.sqrt(float(seen.var(unbiased=False)) + 1e-8), float(seen.abs().max()) / self.config.max_return)

    def step(self, name):
        progress = min(self.steps[name] / self.total, 1.0)
        span = self.config.learning_rate - self.config.final_learning_rate
        rate = self.config.final_learning_rate + span * 0.5 * (1 + math.cos(math.pi * progress))
        self.adams[name].param_groups[0]["lr"] = rate
        self.adams[name].step()
        self.steps[name] += 1

    def sample(self, head):
        mean, raw = head.chunk(2, dim=-1)
        std = torch.exp(-10.0 + 6.0 * (1.0 + torch.tanh(raw)))
        u = mean + std * torch.randn(mean.shape, generator=self.noise).double()
        log_prob = (torch.distributions.Normal(mean, std).log_prob(u) - torch.log(1.0 - torch.tanh(u) ** 2)).sum(-1)
        return torch.tanh(u) * self.scale + self.offset, log_prob

    def value(self, logits):
        return logits.softmax(-1) @ self.atoms

    def update(self, batch, index):
        b = {name: value.double() for name, value in vars(batch).items()}
        rows = len(b["reward"])
        if index % self.config.actor_every == 0:
            self.update_actor(b, rows)
        self.actor.eval()
        with torch.no_grad():
            action, log_prob = self.sample(self.actor(b["next_actor"]))
            both = torch.cat([torch.cat([b["critic"], b["action"]], 1), torch.cat([b["next_critic"], action], 1)])
            logits = [target.train()(both)[rows:] for target in self.targets]
            reward = b["reward"] / self.reward_scale()
            bootstrap = b["discount"] * (1 - b["terminated"])
            alpha = self.log_temperature.exp()
            target = torch.zeros(rows, self.config.atoms, dtype=torch.float64)
            for row in range(rows):
                member = 0 if self.value(logits[0][row]) < self.value(logits[1][row]) else 1
                mass = logits[member][row].softmax(-1)
                for k, atom in enumerate(self.atoms):
                    y = float(reward[row] + bootstrap[row] * (atom - alpha * log_prob[row]))
                    place = (min(max(y, -self.config.max_return), self.config.max_return) + self.config.max_return) / (
                        2 * self.config.max_return / (self.config.atoms - 1)
                    )
                    below = min(int(place), self.config.atoms - 1)
                    target[row, below] += mass[k] * (1 - (place - below))
                    if place > below:
                        target[row, below + 1] += mass[k] * (place - below)
        self.adams["critic"].zero_grad()
        losses = [-(target * critic.train()(both)[:rows].log_softmax(-1)).sum(-1).mean() for critic in self.critics]
        (sum(losses) / 2).backward()
        self.step("critic")
        with torch.no_grad():
            for critic, follower in zip(self.critics, self.targets, strict=True):
                critic.project()
                for p, t in zip(critic.parameters(), follower.parameters(), strict=True):
                    t.mul_(1 - self.config.tau).add_(self.config.tau * p)

    def update_actor(self, b, rows):
        self.actor.train()
        for critic in self.critics:
            critic.eval()
        head = self.actor(torch.cat([b["actor"], b["next_actor"]]))[:rows]
        action, log_prob = self.sample(head)
        inputs = torch.cat([b["critic"], action], 1)
        value = torch.minimum(*[self.value(critic(inputs)) for critic in self.critics])
        self.adams["actor"].zero_grad()
        (self.log_temperature.exp().detach() * log_prob - value).mean().backward()
        target = 0.5 * self.spec.action_size * math.log(2 * math.pi * math.e * self.config.target_std**2)
        self.adams["temperature"].zero_grad()
        (-self.log_temperature.exp() * (log_prob.detach().mean() + target)).backward()
        self.step("actor")
        self.step("temperature")
        self.actor.project()
