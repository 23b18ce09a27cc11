"""One rank's PPO: RSL-RL's algorithm and storage, filled tick by tick from our collector.

A rollout stores what is known when an action is chosen; values are computed for all of it at once when it is complete,
as nothing before needs them. A time limit bootstraps from the value of the true last observation, which RSL-RL would
take from the one before.
"""

from collections.abc import Mapping
from typing import Any

import torch
from rsl_rl.models import MLPModel
from rsl_rl.storage import RolloutStorage
from rsl_rl.utils import resolve_nn_activation
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn import functional

from unilab_fabric.checkpoints import Layouts
from unilab_fabric.errors import UserError
from unilab_fabric.learners.ppo.algorithm import OPTIMISER, PPOAlgorithm
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.learners.ppo.fused import use_fast_passes
from unilab_fabric.learners.skips import SkippedSteps
from unilab_fabric.learners.symmetry import Reflection
from unilab_fabric.parallel.reduce import Ranks
from unilab_fabric.spaces import TaskSpec

METRICS = ("Loss/value", "Loss/surrogate", "Loss/entropy", "Loss/learning_rate", "Policy/mean_std")


class PPOPolicy(nn.Module):
    """The deterministic policy, normaliser inside: (n, actor observation) -> (n, actions)."""

    def __init__(self, actor: MLPModel, activation: str) -> None:
        super().__init__()
        self.normaliser = actor.obs_normalizer
        self.linears: list[nn.Linear] = [layer for layer in actor.mlp if isinstance(layer, nn.Linear)]
        self.layers = nn.ModuleList(self.linears)  # for what asks a module for its parts
        self.activation = resolve_nn_activation(activation)

    def forward(self, observation: Tensor) -> Tensor:
        """The mean action, in plain PyTorch."""
        x: Tensor = self.normaliser(observation)
        for index, layer in enumerate(self.linears):
            x = functional.linear(x if index == 0 else self.activation(x), layer.weight, layer.bias)
        return x


class PPOLearner:
    """See docs/ppo.md. Between two iterations all of its state is replicated but the generator."""

    metric_names: tuple[str, ...] = METRICS
    replicated: Mapping[str, Tensor]
    local: Mapping[str, Tensor]
    layouts: Layouts
    generators: Mapping[str, torch.Generator]

    def __init__(
        self, config: PPO, spec: TaskSpec, device: torch.device, precision: str, ranks: Ranks, seed: int
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.device = device
        self.skipped = SkippedSteps((OPTIMISER,), ranks, device)
        self.updates = 0
        """Optimiser steps since the start of the run; a resumed run sets it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.algorithm = self._build(spec, precision)
        self._stored = 0  # ticks of the rollout whose action is stored
        self._finals: list[tuple[int, Tensor, Tensor]] = []  # tick, environments and last observations of time-outs
        self._chosen = torch.zeros(0)  # newest actions
        self._learning_rate = torch.tensor(config.learning_rate, dtype=torch.float64, device=device)
        self.metrics = torch.zeros(len(METRICS), 2, dtype=torch.float64, device=device)
        self.replicated = self._replicated()
        self.local = {}
        self.layouts = {}
        torch.manual_seed(seed)  # RSL-RL draws actions and mini-batches from the default generator
        default = torch.default_generator if device.type == "cpu" else torch.cuda.default_generators[_index(device)]
        self.generators = {"torch": default}

    @property
    def stored(self) -> int:
        """Ticks of the rollout under way whose action has been chosen."""
        return self._stored

    @torch.no_grad()
    def act(self, actor: Tensor) -> Tensor:
        """Sampled actions for (num_envs, actor observation), (num_envs, actions), not limited."""
        self._chosen = self.algorithm.actor(TensorDict({"actor": actor}, [len(actor)]), stochastic_output=True)
        return self._chosen

    @torch.no_grad()
    def keep(self, actor: Tensor, critic: Tensor) -> None:
        """Stores both observations (num_envs, ...) and what `act` has chosen, while physics steps."""
        model, storage, tick = self.algorithm.actor, self.algorithm.storage, self._stored
        storage.observations["actor"][tick].copy_(actor)
        storage.observations["critic"][tick].copy_(critic)
        storage.actions[tick].copy_(self._chosen)
        storage.actions_log_prob[tick].copy_(model.get_output_log_prob(self._chosen).view(-1, 1))
        assert storage.distribution_params is not None
        for stored, value in zip(storage.distribution_params, model.output_distribution_params, strict=True):
            stored[tick].copy_(value)
        self._stored += 1

    @torch.no_grad()
    def record(self, reward: Tensor, terminated: Tensor, ended: Tensor, final_critic: Tensor) -> None:
        """Stores what followed: rewards and terminations (num_envs,), environments (K,) whose episodes ended.

        final_critic (K, critic observation) are the true last observations of those.
        """
        storage, tick = self.algorithm.storage, self._stored - 1
        storage.rewards[tick].copy_(reward.view(-1, 1))
        done = torch.zeros_like(storage.dones[tick]).index_fill_(0, ended, 1)
        storage.dones[tick].copy_(done)
        if len(ended):
            timed_out = ~terminated[ended]
            self._finals.append((tick, ended[timed_out], final_critic[timed_out]))

    def learn(self, actor: Tensor, critic: Tensor) -> None:
        """The updates of a complete rollout; both observations are those that follow it."""
        algorithm = self.algorithm
        algorithm.learning_rate = float(self._learning_rate)
        for group in algorithm.optimizer.param_groups:
            group["lr"] = algorithm.learning_rate
        with torch.no_grad():
            self._bootstrap_time_limits()
            storage = algorithm.storage
            storage.values.copy_(algorithm.critic(storage.observations.flatten(0, 1)).view_as(storage.values))
            algorithm.compute_returns(_observation(actor, critic))
        losses = algorithm.update()
        self._keep_std()
        self._learning_rate.fill_(algorithm.learning_rate)
        self._stored = 0
        self.updates += self.config.steps_per_iteration
        std = algorithm.actor.output_std.mean().detach()
        values = [losses["value"], losses["surrogate"], losses["entropy"], algorithm.learning_rate, float(std)]
        self.metrics += torch.tensor([[value, 1.0] for value in values], dtype=torch.float64, device=self.device)

    def policy(self) -> PPOPolicy:
        """The deterministic policy, normaliser inside: (n, actor observation) -> (n, actions)."""
        return PPOPolicy(self.algorithm.actor, self.config.activation)

    def nonfinite(self, limit: int) -> list[dict[str, object]]:
        """Up to `limit` values of the newest rollout that are not finite: its tick, environment and field of each."""
        storage = self.algorithm.storage
        fields = {
            "actor observation": storage.observations["actor"],
            "critic observation": storage.observations["critic"],
            "action": storage.actions,
            "reward": storage.rewards,
        }
        found: list[dict[str, object]] = []
        for name, values in fields.items():
            for tick, environment in (~values.isfinite()).any(-1).nonzero().tolist()[: limit - len(found)]:
                found.append({"tick": tick, "environment": environment, "fields": [name]})
        return found

    def _keep_std(self) -> None:
        """RSL-RL's normaliser makes a new tensor for the standard deviation; ours stays where it is registered."""
        if self.config.normalize_observations:
            for group, model in (("actor", self.algorithm.actor), ("critic", self.algorithm.critic)):
                kept = self.replicated[f"{group}/obs_normalizer._std"]
                model.obs_normalizer._std = kept.copy_(model.obs_normalizer._std)

    def _bootstrap_time_limits(self) -> None:
        """Adds the discounted value of the true last observation to the reward of each tick that a time limit ended."""
        if not self._finals:
            return
        values = self.algorithm.critic(
            TensorDict({"critic": torch.cat([last for _, _, last in self._finals])}, device=self.device)
        )
        rows = values.split([len(environments) for _, environments, _ in self._finals])
        for (tick, environments, _), value in zip(self._finals, rows, strict=True):
            self.algorithm.storage.rewards[tick].index_add_(0, environments, self.config.discount * value)
        self._finals.clear()

    def _build(self, spec: TaskSpec, precision: str) -> PPOAlgorithm:
        config = self.config
        sizes = {"actor": spec.actor_size, "critic": spec.critic_size}
        one = TensorDict({name: torch.zeros(spec.num_envs, size) for name, size in sizes.items()}, [spec.num_envs])
        groups = {name: [name] for name in sizes}
        shared = {"activation": config.activation, "obs_normalization": config.normalize_observations}
        gaussian = {"class_name": "GaussianDistribution", "init_std": config.init_std, "std_type": config.std_type}
        actor = MLPModel(
            one, groups, "actor", spec.action_size, config.actor_hidden, distribution_cfg=gaussian, **shared
        )
        critic = MLPModel(one, groups, "critic", 1, config.critic_hidden, **shared)
        if self.device.type == "cpu":
            use_fast_passes(actor.mlp)
            use_fast_passes(critic.mlp)
        storage = RolloutStorage(
            "rl", spec.num_envs, config.num_steps_per_env, one, (spec.action_size,), str(self.device)
        )
        storage.distribution_params = (torch.zeros_like(storage.actions), torch.zeros_like(storage.actions))
        return PPOAlgorithm(
            ranks=self.ranks,
            skipped=self.skipped,
            actor=actor,
            critic=critic,
            storage=storage,
            num_learning_epochs=config.num_learning_epochs,
            num_mini_batches=config.num_mini_batches,
            clip_param=config.clip_param,
            gamma=config.discount,
            lam=config.lam,
            value_loss_coef=config.value_loss_coef,
            entropy_coef=config.entropy_coef,
            learning_rate=config.learning_rate,
            max_grad_norm=config.max_grad_norm,
            use_clipped_value_loss=config.use_clipped_value_loss,
            schedule=config.schedule,
            desired_kl=config.desired_kl,
            normalize_advantage_per_mini_batch=config.normalize_advantage_per_mini_batch,
            use_mixed_precision=precision == "bf16-mixed",
            device=str(self.device),
            symmetry_cfg=self._symmetry(spec),
        )

    def _symmetry(self, spec: TaskSpec) -> dict[str, Any] | None:
        """RSL-RL's settings for mirror images of each mini-batch; raises UserError for a task that has none."""
        if not self.config.symmetry:
            return None
        if spec.mirrors is None:
            allowed = f"task {spec.name} has no mirror images; allowed: false"
            raise UserError("learner.symmetry", True, allowed)
        of = {name: Reflection(mirror, self.device) for name, mirror in spec.mirrors.items()}

        def both_sides(
            env: None, obs: TensorDict | None, actions: Tensor | None
        ) -> tuple[TensorDict | None, Tensor | None]:
            if obs is not None:
                twice = {name: torch.cat([obs[name], of[name].whole(obs[name])]) for name in ("actor", "critic")}
                obs = TensorDict(twice, [2 * obs.batch_size[0]], device=obs.device)
            return obs, None if actions is None else torch.cat([actions, of["action"].whole(actions)])

        return {"env": None, "data_augmentation_func": both_sides, "use_data_augmentation": True}

    def _replicated(self) -> dict[str, Tensor]:
        state: dict[str, Tensor] = {}
        for group, model in (("actor", self.algorithm.actor), ("critic", self.algorithm.critic)):
            state |= {f"{group}/{name}": tensor.data for name, tensor in model.state_dict(keep_vars=True).items()}
            for name, parameter in model.named_parameters():
                adam = self.algorithm.optimizer.state[parameter]
                state |= {f"{group}/{name}/{moment}": value for moment, value in adam.items()}
        return state | {"learning_rate": self._learning_rate, **self.skipped.replicated()}


def _observation(actor: Tensor, critic: Tensor) -> TensorDict:
    return TensorDict({"actor": actor, "critic": critic}, [len(actor)], device=actor.device)


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
