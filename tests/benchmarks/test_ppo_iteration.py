import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script that is run there
    yield importlib.import_module("ppo_iteration")
    del sys.modules["ppo_iteration"]


def test_both_sides_train_the_shipped_preset_with_the_same_networks_and_settings(benchmark, capsys):
    task, init_args, settings = benchmark.preset()
    small = dataclasses.replace(settings, num_steps_per_env=4)
    theirs = benchmark.rsl_rl_runner(task, {**init_args, "num_envs": 8}, small, 1)
    theirs.learn(1)
    with benchmark.our_runner(task, {**init_args, "num_envs": 8}, small, 1) as ours:
        ours.advance()
        own = ours._learner.algorithm
        for name in ("actor", "critic"):
            shapes = [
                {key: tensor.shape for key, tensor in getattr(side, name).state_dict().items()}
                for side in (own, theirs.alg)
            ]
            assert shapes[0] == shapes[1]
        for name in ("clip_param", "gamma", "lam", "entropy_coef", "desired_kl", "max_grad_norm", "schedule"):
            assert getattr(own, name) == getattr(theirs.alg, name), name
        assert own.storage.rewards.shape == theirs.alg.storage.rewards.shape
        assert ours.tick == 4


def test_workers_take_turns_and_are_compared(benchmark, monkeypatch, capsys):
    class Here:
        def __init__(self, name, threads, variables):
            self.variables = variables

        def iteration(self):
            torch.ones(1)

        def close(self):
            pass

    monkeypatch.setattr(benchmark, "Worker", Here)
    numbers = benchmark.measure(1, repeats=1, seconds=0.0)
    assert list(numbers) == ["RSL-RL's runner", "unilab_fabric"]
    assert numbers["RSL-RL's runner"]["ratio"] == 1.0
    assert all(own["env_steps_per_sec"] > 0 for own in numbers.values())
    assert "256 environments, 24 ticks an iteration" in capsys.readouterr().out
