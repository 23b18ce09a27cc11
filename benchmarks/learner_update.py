"""How fast is one FastSAC critic and actor update on this CPU, against plain eager PyTorch?

The reference is what one writes first: float32, one nn.Linear, nn.LayerNorm and nn.SiLU per layer and critic, fused
AdamW over the list of parameters. It does the same work: noise, projected targets, temperature, target networks,
gradient norms, metrics. Each repeat measures the reference and every variant one after the other, in turn; the table
shows medians, and ratios are medians of the ratios within a repeat.

    python benchmarks/learner_update.py [--json PATH] [--threads N] [--quick]
"""

import argparse
import copy
import json
import math
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.fast_sac.learner import FastSACLearner
from unilab_fabric.learners.learner import Batch
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Size:
    name: str
    batch: int
    actor: int
    critic: int
    actions: int
    actor_hidden: tuple[int, ...]
    critic_hidden: tuple[int, ...]

    def spec(self) -> TaskSpec:
        return TaskSpec(
            name=self.name,
            num_envs=1024,
            actor_size=self.actor,
            critic_size=self.critic,
            action_low=(-1.0,) * self.actions,
            action_high=(1.0,) * self.actions,
            metrics=(),
        )

    def config(self, kernels: str) -> FastSAC:
        return FastSAC(
            batch_size=self.batch,
            actor_hidden=self.actor_hidden,
            critic_hidden=self.critic_hidden,
            actor_every=1,
            normalize_observations=False,
            kernels="auto" if kernels == "auto" else "off",
        )

    def batch_of_transitions(self) -> Batch:
        return Batch(
            actor=torch.randn(self.batch, self.actor),
            critic=torch.randn(self.batch, self.critic),
            action=torch.rand(self.batch, self.actions) * 2 - 1,
            reward=torch.randn(self.batch),
            next_actor=torch.randn(self.batch, self.actor),
            next_critic=torch.randn(self.batch, self.critic),
            terminated=torch.rand(self.batch) < 0.01,
            discount=torch.full((self.batch,), 0.97),
        )


PRODUCTION = ((512, 256, 128), (768, 384, 192))
SIZES = [
    Size("G1, batch 512", 512, 98, 101, 29, *PRODUCTION),
    Size("G1, batch 8192", 8192, 98, 101, 29, *PRODUCTION),
    Size("Go2 preset, batch 512", 512, 49, 52, 12, (256, 128, 64), (256, 128, 64)),
]


class PlainFastSAC:
    """The reference: float32, eager, per layer."""

    def __init__(self, size: Size, config: FastSAC) -> None:
        self.config = config
        self.atoms = torch.linspace(config.v_min, config.v_max, config.atoms)
        self.step = (config.v_max - config.v_min) / (config.atoms - 1)
        self.actor = _perceptron(size.actor, config.actor_hidden, 2 * size.actions)
        inputs = size.critic + size.actions
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


VARIANTS = {
    "float32": ("32-true", "auto"),
    "bf16": ("bf16-mixed", "auto"),
    "float32, kernels off": ("32-true", "off"),
    "bf16, kernels off": ("bf16-mixed", "off"),
}


def updates(size: Size) -> dict[str, Callable[[], None]]:
    """One update of the reference and of each variant, by name."""
    batch = size.batch_of_transitions()
    reference = PlainFastSAC(size, size.config("auto"))
    result: dict[str, Callable[[], None]] = {"plain eager float32": lambda: reference.update(batch)}
    for name, (precision, kernels) in VARIANTS.items():
        learner = size.config(kernels).build(size.spec(), CPU, precision, Ranks(), 1, 1_000_000)
        assert isinstance(learner, FastSACLearner)
        result[name] = lambda learner=learner: learner.update(batch, 1)  # type: ignore[misc]
    return result


def measure(size: Size, repeats: int, seconds: float) -> dict[str, list[float]]:
    """Milliseconds per update of each, one figure per repeat; each figure is over about `seconds`."""
    candidates = updates(size)
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for update in candidates.values():
        for _ in range(3):
            update()
    for _ in range(repeats):
        for name, update in candidates.items():
            count, start = 0, time.perf_counter()
            while count < 2 or time.perf_counter() - start < seconds:
                update()
                count += 1
            times[name].append((time.perf_counter() - start) / count * 1e3)
    return times


def report(size: Size, times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    """Prints one table and returns its numbers."""
    reference = times["plain eager float32"]
    numbers = {}
    print(f"\n{size.name}: actor {size.actor_hidden}, critics {size.critic_hidden}")
    print(f"{'':24}{'ms':>10}{'ratio':>8}")
    for name, own in times.items():
        ratio = statistics.median(a / b for a, b in zip(reference, own, strict=True))
        numbers[name] = {"ms": statistics.median(own), "ratio": ratio}
        print(f"{name:24}{numbers[name]['ms']:10.2f}{ratio:8.2f}")
    return numbers


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="also write the numbers there")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads to compute with")
    parser.add_argument("--quick", action="store_true", help="few short repeats: shows that it runs, not how fast")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    repeats, seconds = (2, 0.05) if arguments.quick else (9, 0.5)
    print(f"{processor()}, {arguments.threads} threads, torch {torch.__version__}")
    print("one critic (with temperature and target) and one actor update; ratio: reference time / own time")
    numbers = {size.name: report(size, measure(size, repeats, seconds)) for size in SIZES}
    if arguments.json is not None:
        machine = {"processor": processor(), "threads": arguments.threads, "torch": torch.__version__}
        arguments.json.write_text(json.dumps({**machine, "sizes": numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
