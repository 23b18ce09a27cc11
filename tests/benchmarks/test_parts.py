"""The short benchmarks: all sides of each do the same work, and the figures are what was measured."""

import json

import pytest
import torch

from tests.ranks import run_ranks

# collectives


@pytest.mark.parametrize("total", [1_000, 10_000, 1_000_000])
def test_parameters_are_about_as_many_as_asked_for(script, total):
    sizes = script("collectives").parameter_sizes(total)
    assert sum(sizes) == pytest.approx(total, rel=0.1)
    assert len(sizes) == 16


def test_buckets_hold_every_tensor_once_from_the_last_and_no_more_than_their_size(script):
    collectives = script("collectives")
    tensors = [torch.zeros(size) for size in (200_000, 100_000, 7_000_000, 100_000, 100_000, 100_000)]
    packed = collectives.buckets(tensors)
    assert [[tensor.numel() for tensor in bucket] for bucket in packed] == [
        [100_000, 100_000],  # 1 MiB is 262,144 floats
        [100_000],  # the next one does not fit into 25 MiB with it
        [7_000_000],
        [100_000, 200_000],
    ]
    assert packed[0][0] is tensors[-1]


def _averages(ranks, module, sizes):
    import importlib
    import sys
    from dataclasses import replace

    from tests.benchmarks.conftest import BENCHMARKS
    from unilab_fabric.parallel.shared import open_shared_sum

    sys.path.insert(0, str(BENCHMARKS))
    collectives = importlib.import_module(module)
    ranks = replace(ranks, shared=open_shared_sum(ranks.rank, ranks.world_size, ranks.gather))
    flat = torch.empty(sum(sizes))
    found = {}
    for name, call in collectives.candidates(flat, sizes, ranks).items():
        flat.copy_(torch.arange(float(len(flat))) * (ranks.rank + 1))
        call()
        found[name] = flat.clone()
    return found


def test_all_ways_average_the_same(script):
    sizes = script("collectives").parameter_sizes(1000)
    for found in run_ranks(_averages, [("collectives", sizes)] * 2):
        assert len(found) >= 3
        for name, flat in found.items():
            assert torch.allclose(flat, 1.5 * torch.arange(float(len(flat)))), name


def test_processes_measure_collectives(script):
    times = script("collectives").measure(2, False, 2, 0.01, (1_000,))
    assert all(len(own) == 2 and min(own) > 0 for own in times[1_000].values())


def test_a_process_that_fails_is_an_error_and_no_figure(script):
    with pytest.raises(SystemExit, match=r"the processes of ranks .*0.* have failed"):
        script("collectives").measure(2, False, 1, 0.01, ("no number",))


# the others


def test_both_replays_hold_the_same_transitions(script):
    replay = script("replay")
    ours, plain, _ = replay.filled(20)
    drawn = ours.sample(4096)
    rewards = {float(reward): row for row, reward in enumerate(plain.fields["reward"])}
    rows = torch.tensor([rewards[float(reward)] for reward in drawn.reward])
    for name in ("actor", "critic", "next_actor", "next_critic", "action"):
        assert torch.equal(getattr(drawn, name), plain.fields[name][rows]), name


def test_hand_overs_are_measured_against_the_pipe(script):
    module = script("hand_over")
    numbers = module.measure(1, 0.01)
    assert numbers[module.REFERENCE]["ratio"] == 1
    assert all(one["ms"] > 0 for one in numbers.values())


def test_checkpoints_are_saved_and_loaded_by_all_sides(script, tmp_path, capsys):
    module = script("checkpoint")
    numbers = module.measure(3, tmp_path, 1, 0.0)
    for what in ("save", "load"):
        assert set(numbers[what]) == {module.REFERENCE, module.OURS, module.BYTES}
    assert (tmp_path / "raw").stat().st_size == numbers["bytes"]["files"]["bytes"]


def test_start_up_tells_medians_and_ratios_within_a_repeat(script, monkeypatch, tmp_path):
    module = script("start_up")
    reference, firsts = iter([9.0, 1.0, 2.0, 1.0]), iter([9.0, 3.0, 4.0, 5.0])
    monkeypatch.setattr(module, "import_s", lambda: next(reference))
    monkeypatch.setattr(module, "first_tick_s", lambda folder, name, devices: next(firsts))
    assert module.main(["--devices", "1", "--repeats", "3", f"--json={tmp_path / 'it.json'}"]) == 0
    numbers = json.loads((tmp_path / "it.json").read_text())["start_up"]
    assert numbers["1 rank"] == {"s": 4.0, "times_the_reference": 3.0}  # of 3, 2, 5; the first pair does not count


def test_a_run_without_a_first_tick_is_an_error(script, monkeypatch, capsys):
    module = script("start_up")
    monkeypatch.setattr(module, "import_s", lambda: 1.0)
    monkeypatch.setattr(module, "fit", lambda *arguments: None)
    monkeypatch.setattr(module, "summary", lambda folder: {"first_tick_s": None})
    assert module.main([]) == 2
    assert "error: the run 1-0 has no first_tick_s" in capsys.readouterr().err


# the time to a return


@pytest.fixture
def returns(script, monkeypatch):
    """`time_to_return` over runs that nobody trained: by devices, the returns of reports 10 s apart."""
    module = script("time_to_return")

    def fake(by_devices):
        clock = iter(range(1000, 100_000, 1000))
        monkeypatch.setattr(module.time, "time", lambda: float(next(clock)))
        starts = iter(range(1000, 100_000, 1000))

        def series(folder):
            devices, since = int(folder.name.split("-")[1]), next(starts)
            values = by_devices[devices]
            return {module.RETURN: module.Series(values, [since + 10.0 * (i + 1) for i in range(len(values))])}

        monkeypatch.setattr(module, "fit", lambda *arguments: None)
        monkeypatch.setattr(module, "summary", lambda folder: {})
        monkeypatch.setattr(module, "series", series)
        return module

    return fake


def test_the_time_is_that_of_the_first_report_with_the_return(returns, tmp_path):
    module = returns({1: [1.0, 240.0, 200.0, 251.0, 300.0], 2: [100.0, 250.0]})
    assert module.main(["--seeds", "1", "2", "--devices", "2", f"--json={tmp_path / 'it.json'}"]) == 0
    numbers = json.loads((tmp_path / "it.json").read_text())["devices"]
    assert numbers["1"] == {"s": [40.0, 40.0], "median_s": 40.0, "ratio": 1.0}
    assert numbers["2"] == {"s": [20.0, 20.0], "median_s": 20.0, "ratio": 2.0}


@pytest.mark.parametrize(
    ("values", "text"),
    [([1.0, 2.0], "the best of 2 reports is 2.0"), ([], "there is no report of it")],
)
def test_a_return_that_is_not_reached_is_an_error_and_no_figure(returns, tmp_path, capsys, values, text):
    module = returns({1: values})
    assert module.main(["--devices", "1", f"--json={tmp_path / 'it.json'}"]) == 2
    assert f"error: FastSAC-1-1: no return of 250 was reached: {text}" in capsys.readouterr().err
    assert not (tmp_path / "it.json").exists()
