"""All of the CUDA benchmark but CUDA: a recorder stands in for the graph, and the host for the device."""

import dataclasses
import importlib
import sys
from pathlib import Path

import pytest
import torch

from tests.offpolicy.recorder import Recorder
from unilab_fabric.learners.fast_sac.config import FastSAC
from unilab_fabric.learners.flash_sac.config import FlashSAC

ROOT = Path(__file__).parents[2]
FAST = FastSAC(
    batch_size=16, actor_hidden=(16,), critic_hidden=(16,), updates_per_tick=4, replay_ticks=60, kernels="off"
)
FLASH = FlashSAC(
    batch_size=16, actor_width=16, critic_width=16, blocks=1, learning_starts=5, replay_ticks=60, kernels="off"
)


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script that is run there
    module = importlib.import_module("cuda_cycle")
    monkeypatch.setattr(module, "CudaGraph", Recorder)
    monkeypatch.setattr(module, "G1", dataclasses.replace(module.G1, num_envs=8))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    yield module
    del sys.modules["cuda_cycle"]


@pytest.mark.parametrize("settings", [FAST, FLASH], ids=["FastSAC", "FlashSAC"])
def test_every_way_does_a_tick_s_updates(benchmark, settings):
    ways = benchmark.ways(settings, torch.device("cpu"), "32-true")
    assert list(ways) == ["eager", "graph", "graph per update"]
    for _ in range(5):
        for run in ways.values():
            run()


def test_the_floor_is_the_larger_of_what_moves_and_what_is_computed(benchmark):
    fast_memory = benchmark.Rates(bytes_per_s=1e30, flop_per_s=1e12)
    slow_memory = benchmark.Rates(bytes_per_s=1e6, flop_per_s=1e30)
    for settings in (FAST, FLASH):
        computing, moving = (benchmark.floor_s(settings, rates, 4) for rates in (fast_memory, slow_memory))
        assert benchmark.floor_s(settings, benchmark.Rates(1e6, 1e12), 4) == pytest.approx(max(computing, moving))
        twice = dataclasses.replace(settings, batch_size=32)
        assert benchmark.floor_s(twice, fast_memory, 4) == pytest.approx(2 * computing)


def test_without_a_device_nothing_is_measured(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["cuda_cycle.py"])
    benchmark.main()
    assert "nothing was measured" in capsys.readouterr().out
