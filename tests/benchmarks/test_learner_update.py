import dataclasses
import importlib.util
import sys
from pathlib import Path

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("learner_update", ROOT / "benchmarks" / "learner_update.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["learner_update"] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["learner_update"]


def test_the_preset_that_is_measured_is_the_one_that_ships(benchmark):
    shipped = yaml.safe_load((ROOT / "configs" / "sac.yaml").read_text())["learner"]["init_args"]
    measured = benchmark.SIZES[-1]
    assert measured.batch == shipped["batch_size"]
    assert measured.actor_hidden == tuple(shipped["actor_hidden"])
    assert measured.critic_hidden == tuple(shipped["critic_hidden"])


def test_every_variant_runs_and_is_compared_with_the_reference(benchmark, capsys):
    small = dataclasses.replace(benchmark.SIZES[-1], batch=8, actor_hidden=(16, 16), critic_hidden=(16, 16))
    numbers = benchmark.report(small, benchmark.measure(small, repeats=1, seconds=0.0))
    assert list(numbers) == ["plain eager float32", *benchmark.VARIANTS]
    assert numbers["plain eager float32"]["ratio"] == 1.0
    assert all(own["ms"] > 0 for own in numbers.values())
    assert "bf16, kernels off" in capsys.readouterr().out


def test_the_reference_learns_what_the_learner_does(benchmark, monkeypatch):
    """Same weights, no noise: the reference does the same work, so its time is a fair one."""
    size = dataclasses.replace(benchmark.SIZES[-1], batch=32, actor_hidden=(32, 16), critic_hidden=(32, 16))
    learner = size.config("off").build(size.spec(), benchmark.CPU, "32-true", benchmark.Ranks(), 1, 100)
    reference = benchmark.PlainFastSAC(size, size.config("off"))
    copy_into(reference.actor, learner.actor.net, 0)
    for member, (critic, target) in enumerate(zip(reference.critics, reference.targets, strict=True)):
        copy_into(critic, learner.critic.net, member)
        copy_into(target, learner.target.net, member)
    batch = size.batch_of_transitions()
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    monkeypatch.setattr(torch, "randn", lambda size, **_: torch.zeros(size))
    for _ in range(3):
        reference.update(batch)
        learner.update(batch, 0)
    torch.testing.assert_close(reference.log_temperature.detach(), learner.log_temperature[0], atol=1e-6, rtol=0.0)
    for member, critic in enumerate(reference.critics):
        torch.testing.assert_close(critic[0].weight, learner.critic.net.linears[0].weight[member], atol=2e-5, rtol=0.0)
    torch.testing.assert_close(reference.actor[0].weight, learner.actor.net.linears[0].weight[0], atol=2e-5, rtol=0.0)


def copy_into(plain, mlp, member):
    layers = [*mlp.linears, mlp.head]
    for ours, theirs in zip(layers, [m for m in plain if isinstance(m, torch.nn.Linear)], strict=True):
        theirs.weight.data.copy_(ours.weight[member])
        theirs.bias.data.copy_(ours.bias[member])
