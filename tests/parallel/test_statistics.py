import pytest
import torch

from tests.ranks import run_ranks
from unilab_fabric.parallel.statistics import RunningNormaliser, batch_moments

KEEP = torch.tensor(True)


def batches(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scale, shift = torch.tensor([1.0, 0.01, 300.0]), torch.tensor([0.0, 1000.0, -5.0])
    return [torch.randn(40, 3, generator=generator) * scale + shift * (1.0 + 1e-4 * i) for i in range(count)]


def assert_describes(normaliser, rows):
    variance, mean = torch.var_mean(rows.double(), dim=0, unbiased=False)
    assert normaliser.count.item() == len(rows)
    torch.testing.assert_close(normaliser.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(normaliser.variance, variance, rtol=2e-4, atol=0.0)


def test_statistics_of_successive_batches_are_those_of_the_joined_data():
    normaliser = RunningNormaliser(3)
    data = batches(7)
    for rows in data:
        normaliser.merge(batch_moments(rows).unsqueeze(0), len(rows), KEEP)
    assert_describes(normaliser, torch.cat(data))


def test_moments_of_several_ranks_merge_to_those_of_the_joined_data():
    normaliser = RunningNormaliser(3)
    data = batches(6)
    for tick in (data[:3], data[3:]):
        normaliser.merge(torch.stack([batch_moments(rows) for rows in tick]), 40, KEEP)
    assert_describes(normaliser, torch.cat(data))


def gather_and_merge(ranks, data):
    normaliser = RunningNormaliser(3)
    for rows in data:
        gathered = torch.zeros(ranks.world_size, 2, 3)
        gathered[ranks.rank] = batch_moments(rows)
        ranks.mean_(gathered, "moments")
        normaliser.merge(gathered * ranks.world_size, len(rows), KEEP)
    return normaliser.replicated("n")


@pytest.mark.parametrize("world_size", [2, 3])
def test_gathered_over_processes_they_are_the_same_bits_on_all_and_describe_the_joined_data(world_size):
    data = [batches(4, seed=rank) for rank in range(world_size)]
    states = run_ranks(gather_and_merge, [(own,) for own in data])
    for other in states[1:]:
        assert all(torch.equal(states[0][name], other[name]) for name in other)
    merged = RunningNormaliser(3)
    merged.load_state_dict({name.removeprefix("n/"): value for name, value in states[0].items()})
    assert_describes(merged, torch.cat([rows for own in data for rows in own]))


def test_a_merge_that_is_not_kept_changes_nothing_even_if_its_moments_are_not_finite():
    normaliser = RunningNormaliser(3)
    normaliser.merge(batch_moments(batches(1)[0]).unsqueeze(0), 40, KEEP)
    before = {name: value.clone() for name, value in normaliser.replicated("n").items()}
    normaliser.merge(torch.full((1, 2, 3), torch.nan), 40, torch.tensor(False))
    assert all(torch.equal(before[name], value) for name, value in normaliser.replicated("n").items())


def test_normalised_data_have_mean_0_and_spread_near_1():
    normaliser = RunningNormaliser(3)
    rows = batches(1)[0]
    normaliser.merge(batch_moments(rows).unsqueeze(0), len(rows), KEEP)
    normalised = normaliser(rows)
    torch.testing.assert_close(normalised.mean(0), torch.zeros(3), atol=2e-3, rtol=0.0)
    # 0.01 is added to the standard deviation: 1 -> 0.99, 0.01 -> 0.5, 300 -> 1
    torch.testing.assert_close(normalised.std(0, unbiased=False), torch.tensor([0.99, 0.5, 1.0]), atol=0.1, rtol=0.0)


def test_before_the_first_merge_observations_keep_their_values():
    rows = batches(1)[0]
    torch.testing.assert_close(RunningNormaliser(3)(rows), rows / 1.01)
