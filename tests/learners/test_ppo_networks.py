"""The fast passes of RSL-RL's perceptrons against PyTorch's, and the policy that leaves the trainer."""

import copy

import pytest
import torch
from rsl_rl.modules import MLP

from tests.learners.problems import CPU, spec
from unilab_fabric.learners.kernels import load_kernels
from unilab_fabric.learners.ppo.config import PPO
from unilab_fabric.learners.ppo.fused import ProductLinear, use_fast_passes
from unilab_fabric.parallel.reduce import Ranks


@pytest.mark.parametrize("activation", ["elu", "tanh"])
def test_a_perceptron_computes_the_same_with_fast_passes(activation):
    torch.manual_seed(0)
    plain = MLP(9, 4, (32, 16, 8), activation)
    fast = copy.deepcopy(plain)
    use_fast_passes(fast)
    assert list(fast.state_dict()) == list(plain.state_dict())
    linears = [module for module in fast if isinstance(module, ProductLinear)]
    assert len(linears) == 4
    with_elu = 3 if activation == "elu" and load_kernels(torch.float32) is not None else 0
    assert sum(module.kernels is not None for module in linears) == with_elu
    x = torch.randn(50, 9, requires_grad=True)
    found = []
    for network in (plain, fast):
        x.grad = None
        out = network(x)
        out.square().sum().backward()
        found.append([out.detach(), x.grad.clone(), *(p.grad for p in network.parameters())])
        with torch.no_grad():
            torch.testing.assert_close(network(x), out)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(x), plain(x), rtol=0.05, atol=0.05)


def test_the_policy_is_the_mean_of_the_actor_normaliser_included():
    learner = PPO(actor_hidden=(16, 8), critic_hidden=(8,)).build(spec(), CPU, "32-true", Ranks(), 1, 1)
    learner.algorithm.actor.obs_normalizer._mean.fill_(0.5)
    learner.algorithm.actor.obs_normalizer._std.fill_(2.0)
    observation = torch.randn(32, 6)
    learner.act(observation)
    torch.testing.assert_close(learner.policy()(observation), learner.algorithm.actor.output_mean)
    assert not any(isinstance(module, torch.autograd.Function) for module in learner.policy().modules())
    traced = torch.jit.trace(learner.policy(), observation)
    torch.testing.assert_close(traced(observation[:3]), learner.policy()(observation[:3]))
