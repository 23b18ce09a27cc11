import dataclasses
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))  # as for a script that is run there
    yield importlib.import_module("scaling_model")
    del sys.modules["scaling_model"]


@pytest.fixture
def tick(model):
    """10 ms of physics beside 4 ms of update; one gradient of 8 MB."""
    return model.Tick(
        env_steps=100,
        physics_s=10e-3,
        serial_s=1e-3,
        update_s=4e-3,
        other_s=0.5e-3,
        overlap_s=0.5e-3,
        jitter_s=0.0,
        reductions=(model.Reduction(num_bytes=8e6, per_tick=1),),
    )


def cluster(model, latency_s=1e-6, bytes_per_s=1e12, ranks_per_machine=1024):
    link = model.Link(latency_s=latency_s, bytes_per_s=bytes_per_s)
    return model.Cluster(ranks_per_machine=ranks_per_machine, inside=link, between=link)


def test_an_all_reduce_of_two_ranks_by_hand(model):
    link = model.Link(latency_s=1e-3, bytes_per_s=1e9)
    # each sends half of 8 MB, then half again; either algorithm
    assert model.ring_s(8e6, 2, link) == (2e-3, 8e-3)
    assert model.halving_doubling_s(8e6, 2, link) == (2e-3, 8e-3)


def test_an_all_reduce_of_eight_ranks_by_hand(model):
    link = model.Link(latency_s=1e-3, bytes_per_s=1e9)
    assert model.ring_s(8e6, 8, link) == pytest.approx((14e-3, 14e-3))  # 14 messages of 1 MB
    assert model.halving_doubling_s(8e6, 8, link) == pytest.approx((6e-3, 14e-3))  # 4, 2, 1, 1, 2, 4 MB


def test_one_rank_sends_nothing(model, tick):
    alone = model.predict(tick, 1, cluster(model))
    assert (alone.latency_s, alone.bandwidth_s, alone.waiting_s, alone.efficiency) == (0, 0, 0, 1)
    assert alone.tick_s == pytest.approx(12e-3)  # 1 serial, 10 physics, 0.5 overlap, 0.5 other
    assert alone.env_steps_per_sec == pytest.approx(100 / 12e-3)


def test_an_all_reduce_goes_inside_machines_and_then_between_them(model):
    inside, between = model.Link(latency_s=1e-6, bytes_per_s=1e9), model.Link(latency_s=1e-3, bytes_per_s=1e6)
    machines = model.Cluster(ranks_per_machine=2, inside=inside, between=between)
    messages, volume = model.all_reduce_s(1e6, 8, machines)
    assert messages == pytest.approx(2e-6 + 4e-3)  # 2 ranks, then 4 machines in 2 log2 4 steps
    assert volume == pytest.approx(1e-3 + 1.5)


def test_the_update_and_its_all_reduce_hide_beside_physics_until_they_are_longer(model, tick):
    hidden = model.predict(tick, 2, cluster(model, bytes_per_s=8e6 / 5e-3))  # 4 + 5 ms, physics 10
    assert hidden.tick_s == pytest.approx(12e-3, rel=1e-3)
    assert hidden.efficiency == pytest.approx(1.0)
    assert hidden.limit == "physics"
    shown = model.predict(tick, 2, cluster(model, bytes_per_s=8e6 / 10e-3))  # 4 + 10
    assert shown.tick_s == pytest.approx(16e-3, rel=1e-3)
    assert shown.efficiency == pytest.approx(12 / 16, rel=1e-3)
    assert shown.limit == "bandwidth"


def test_on_one_core_everything_adds_up_and_nothing_overlaps(model, tick):
    shared = dataclasses.replace(tick, one_core=True)
    assert model.predict(shared, 1, cluster(model)).tick_s == pytest.approx(15.5e-3)
    assert model.predict(shared, 2, cluster(model, bytes_per_s=8e6 / 5e-3)).tick_s == pytest.approx(20.5e-3, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "link", "limit"),
    [
        ({}, {}, "physics"),
        ({"update_s": 11e-3}, {}, "update"),
        ({}, {"latency_s": 10e-3}, "latency"),
        ({}, {"bytes_per_s": 1e8}, "bandwidth"),
        ({"jitter_s": 20e-3}, {}, "waiting"),
    ],
)
def test_each_part_can_limit(model, tick, change, link, limit):
    assert model.predict(dataclasses.replace(tick, **change), 4, cluster(model, **link)).limit == limit


@pytest.mark.parametrize("ranks", [2, 3, 64])
def test_throughput_falls_with_latency_and_rises_with_bandwidth(model, tick, ranks):
    busy = dataclasses.replace(tick, update_s=20e-3)

    def rate(latency_s, bytes_per_s):
        return model.predict(busy, ranks, cluster(model, latency_s, bytes_per_s)).env_steps_per_sec

    by_latency = [rate(latency_s, 1e9) for latency_s in (1e-6, 1e-4, 1e-3)]
    assert by_latency == sorted(by_latency, reverse=True)
    assert len(set(by_latency)) == 3
    by_bandwidth = [rate(1e-6, bytes_per_s) for bytes_per_s in (1e8, 1e9, 1e10)]
    assert by_bandwidth == sorted(by_bandwidth)
    assert len(set(by_bandwidth)) == 3


def test_half_an_all_reduce_in_a_tick_costs_half(model, tick):
    halved = dataclasses.replace(tick, reductions=(model.Reduction(num_bytes=8e6, per_tick=0.5),))
    whole, half = (model.predict(one, 2, cluster(model, 1e-3, 1e9)) for one in (tick, halved))
    assert (whole.latency_s, whole.bandwidth_s) == (2e-3, 8e-3)
    assert (half.latency_s, half.bandwidth_s) == (1e-3, 4e-3)


def test_the_slowest_of_many_ranks(model):
    assert model.expected_maximum(1) == pytest.approx(0.0, abs=1e-9)
    assert model.expected_maximum(2) == pytest.approx(1 / math.sqrt(math.pi))
    assert model.expected_maximum(3) == pytest.approx(1.5 / math.sqrt(math.pi))
    draws = np.random.default_rng(1).standard_normal((20_000, 64)).max(axis=1)
    assert model.expected_maximum(64) == pytest.approx(draws.mean(), abs=4 * draws.std() / math.sqrt(20_000))
    assert model.expected_maximum(1024) < math.sqrt(2 * math.log(1024))


def test_the_wait_for_the_slowest_rank_is_added(model, tick):
    uneven = dataclasses.replace(tick, jitter_s=2e-3)
    two = model.predict(uneven, 2, cluster(model))
    assert two.waiting_s == pytest.approx(2e-3 / math.sqrt(math.pi))
    assert two.tick_s == pytest.approx(12e-3 + two.waiting_s)


def test_a_tick_is_measured_from_reports(model):
    def row(tick_ms, wait_ms):
        times = {"physics": 7.0, "rewards": 0.9, "copy": 0.1, "commit": 0.5, "act": 0.5, "update": 6.0, "wait": wait_ms}
        rate = 64 / tick_ms * 1e3
        return {"Perf/env_steps_per_sec": rate} | {f"Perf/{phase}_ms": ms for phase, ms in times.items()}

    tick = model.measured_tick([row(9.5, 2.0), row(10.5, 3.0)], 64, ())
    measured = [1e3 * s for s in (tick.physics_s, tick.serial_s, tick.update_s, tick.other_s, tick.overlap_s)]
    # a mean tick of 10, of which the learner's phases hold 9.5; 1 + 8 are the longer chain
    assert measured == pytest.approx([8.0, 1.0, 6.0, 0.5, 0.5])
    assert tick.jitter_s == pytest.approx(1e-3 / math.sqrt(2))
    assert model.predict(tick, 1, cluster(model)).tick_s == pytest.approx(10e-3)


def test_gradients_are_those_of_the_shipped_preset(model):
    num_envs, settings, task = model.preset()
    critic, actor = model.reductions_of(settings, task)
    assert (num_envs, task["class_path"]) == (256, "Go2JoystickFlat")
    weights = 49 * 256 + 256 * 128 + 128 * 64 + 64 * 24
    assert 4 * weights < actor.num_bytes < 1.1 * 4 * weights  # beside them biases and norms
    assert (critic.per_tick, actor.per_tick) == (1, 0.5)
    assert critic.num_bytes > actor.num_bytes


@pytest.mark.parametrize("gloo", [True, False])
def test_two_processes_measure_a_link(model, gloo):
    link = model.measured_link(gloo, False, 0.05)
    assert 1e-6 < link.latency_s < 0.1
    assert 1e6 < link.bytes_per_s < 1e12


def test_prediction_stands_beside_measurement(model, monkeypatch, capsys, tmp_path):
    rows = [
        {"Perf/env_steps_per_sec": rate}
        | {f"Perf/{phase}_ms": 2.0 for phase in ("wait", "commit", "act", "update", "physics")}
        | {"Perf/rewards_ms": 0.0, "Perf/copy_ms": 0.0}
        for rate in (25_600.0, 25_600.0)
    ]
    monkeypatch.setattr(model, "run", lambda *arguments, **options: rows)
    monkeypatch.setattr(model.os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(model, "measured_link", lambda gloo, busy, s: model.Link(latency_s=1e-5, bytes_per_s=1e9))
    monkeypatch.setattr(sys, "argv", ["scaling_model.py", "--json", str(tmp_path / "model.json")])
    model.main()
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if line.startswith("1 rank, 2 cores")]
    assert line.split()[-3:] == ["25,600", "25,600", "+0%"]
    (line,) = [line for line in out.splitlines() if line.startswith("1 rank, 1 core ")]
    assert line.split()[-3:] == ["25,600", "25,600", "+0%"]  # 4 + 2 + 2 ms and 2 ms between ticks
    (line,) = [line for line in out.splitlines() if line.startswith("3 ranks")]
    assert line.endswith("refused on 2 cores: a rank needs one")
    numbers = json.loads((tmp_path / "model.json").read_text())
    assert numbers["cases"]["1 rank, 2 cores"]["error"] == pytest.approx(0.0)
    for table in numbers["tables"].values():
        assert [row["ranks"] for row in table] == [2**power for power in range(11)]


def test_a_slow_link_is_made_in_a_namespace_of_its_own(model, monkeypatch):
    started = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **options: started.append(command) or subprocess.CompletedProcess(command, 3)
    )
    assert model.in_namespace("100mbit", ["--rounds=1"]) == 3
    ((program, net, *_, script, rounds),) = started
    assert (program, net, rounds) == ("unshare", "--net", "--rounds=1")
    assert script.endswith("scaling_model.py")
    assert "tc qdisc add dev lo root tbf rate 100mbit " in started[0][4]
