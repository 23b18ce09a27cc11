import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(ROOT / "benchmarks"))  # as for a script that is run there
    yield importlib.import_module("learner_update")
    sys.path.remove(str(ROOT / "benchmarks"))


def small(benchmark, name, rows):
    """A size of the benchmark, made small; no kernels."""
    (size,) = (size for size in benchmark.SIZES if size.name == name)
    narrow = {"actor_hidden": (32, 16), "critic_hidden": (32, 16)}
    if "FlashSAC" in name:
        narrow = {"actor_width": 16, "critic_width": 24}
    settings = dataclasses.replace(size.settings, batch_size=rows, kernels="off", **narrow)
    return dataclasses.replace(size, settings=settings)


NAMES = ["FastSAC, Go2 preset, batch 512", "FlashSAC, Go2 preset, batch 512"]


@pytest.mark.parametrize(("name", "preset"), [(NAMES[0], "sac.yaml"), (NAMES[1], "flash_sac.yaml")])
def test_the_preset_that_is_measured_is_the_one_that_ships(benchmark, name, preset):
    shipped = yaml.safe_load((ROOT / "configs" / preset).read_text())["learner"]["init_args"]
    (measured,) = (size.settings for size in benchmark.SIZES if size.name == name)
    for key in ("batch_size", "actor_hidden", "critic_hidden", "actor_width", "critic_width", "blocks"):
        if key in shipped:
            value = getattr(measured, key)
            assert (list(value) if isinstance(value, tuple) else value) == shipped[key], key


@pytest.mark.parametrize("name", NAMES)
def test_every_variant_runs_and_is_compared_with_the_reference(benchmark, name, capsys):
    numbers = benchmark.measure(small(benchmark, name, 8), repeats=1, seconds=0.0)
    assert list(numbers)[:3] == ["plain eager float32", "float32", "bf16"]
    assert numbers["plain eager float32"]["ratio"] == 1.0
    assert all(own["ms"] > 0 for own in numbers.values())
    assert "bf16" in capsys.readouterr().out


def without_noise(monkeypatch):
    monkeypatch.setattr(torch, "randn_like", torch.zeros_like)
    monkeypatch.setattr(torch, "randn", lambda size, **_: torch.zeros(size))


def close(ours, plain, learning_rate=3e-4):
    """RMS of the difference under 1% of a step: Adam may turn the rounding of single weights into more."""
    assert (ours - plain).square().mean().sqrt() < 0.01 * learning_rate


def test_fast_sac_s_reference_learns_what_the_learner_does(benchmark, monkeypatch):
    """Same weights, no noise: the reference does the same work, so its time is a fair one."""
    size = small(benchmark, NAMES[0], 32)
    spec = size.robot.spec()
    learner = size.settings.build(spec, benchmark.CPU, "32-true", benchmark.Ranks(), 1, 100)
    reference = benchmark.PlainFastSAC(spec, size.settings)
    copy_fast(reference.actor, learner.actor.net, 0)
    for member, (critic, target) in enumerate(zip(reference.critics, reference.targets, strict=True)):
        copy_fast(critic, learner.critic.net, member)
        copy_fast(target, learner.target.net, member)
    batch = size.robot.batch(32)
    without_noise(monkeypatch)
    for _ in range(3):
        reference.update(batch)
        learner.update(batch, 0)
    close(learner.log_temperature[0], reference.log_temperature.detach())
    for member, critic in enumerate(reference.critics):
        close(learner.critic.net.linears[0].weight[member], critic[0].weight)
    close(learner.actor.net.linears[0].weight[0], reference.actor[0].weight)


def copy_fast(plain, mlp, member):
    layers = [*mlp.linears, mlp.head]
    for ours, theirs in zip(layers, [m for m in plain if isinstance(m, nn.Linear)], strict=True):
        theirs.weight.data.copy_(ours.weight[member])
        theirs.bias.data.copy_(ours.bias[member])


def test_flash_sac_s_reference_learns_what_the_learner_does(benchmark, monkeypatch):
    size = small(benchmark, NAMES[1], 32)
    settings = dataclasses.replace(size.settings, final_learning_rate=size.settings.learning_rate)
    spec = size.robot.spec()
    learner = settings.build(spec, benchmark.CPU, "32-true", benchmark.Ranks(), 1, 100)
    learner.observe(torch.full((spec.num_envs,), 5.0), torch.zeros(0, dtype=torch.int64))  # a reward scale of 1
    reference = benchmark.PlainFlashSAC(spec, settings, reward_scale=1.0)
    copy_flash(reference.actor, learner.actor.net, 0)
    for member, (critic, target) in enumerate(zip(reference.critics, reference.targets, strict=True)):
        copy_flash(critic, learner.critic, member)
        copy_flash(target, learner.target, member)
    batch = size.robot.batch(32)
    without_noise(monkeypatch)
    for _ in range(3):
        reference.update(batch)
        learner.update(batch, 0)
    close(learner.log_temperature[0], reference.log_temperature.detach())
    for member, critic in enumerate(reference.critics):
        close(learner.critic.embedder.weight[member], critic[1].weight)
        close(learner.critic.head.weight[member], critic[-1].weight)
    close(learner.actor.net.wide[0].weight[0], reference.actor[2].wide.weight)


def copy_flash(plain, net, member):
    ours = [net.input_norm.weight, net.input_norm.bias, net.embedder.weight]
    for wide, wide_norm, narrow, narrow_norm in zip(
        net.wide, net.wide_norms, net.narrow, net.narrow_norms, strict=True
    ):
        ours += [wide.weight, wide_norm.weight, wide_norm.bias, narrow.weight, narrow_norm.weight, narrow_norm.bias]
    ours += [net.output_norm.weight, net.head.weight, net.head_bias]
    for own, theirs in zip(ours, plain.parameters(), strict=True):
        theirs.data.copy_(own[member])
