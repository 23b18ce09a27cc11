import math

import pytest
import torch

from unilab_fabric.learners.categorical import cross_entropy, expected_value, project

LOW, HIGH = -2.0, 2.0  # atoms -2, -1, 0, 1, 2
UNIFORM = [0.2] * 5


def projected(probabilities, reward, *, bootstrap=1.0):
    row = project(torch.tensor([probabilities]), torch.tensor([reward]), torch.tensor([bootstrap]), LOW, HIGH)
    return row[0].tolist()


@pytest.mark.parametrize("atom", range(5))
def test_a_distribution_that_does_not_move_stays(atom):
    one_hot = [float(k == atom) for k in range(5)]
    assert projected(one_hot, 0.0) == one_hot


def test_mass_between_two_atoms_is_split_by_distance():
    assert projected([0.0, 1.0, 0.0, 0.0, 0.0], 0.25) == [0.0, 0.75, 0.25, 0.0, 0.0]


def test_atoms_shrink_towards_zero_by_the_bootstrap():
    # -2 -> -1, 2 -> 1
    assert projected([0.5, 0.0, 0.0, 0.0, 0.5], 0.0, bootstrap=0.5) == [0.0, 0.5, 0.0, 0.5, 0.0]


def test_a_reward_beyond_the_support_puts_everything_on_the_last_atom():
    assert projected(UNIFORM, 9.0) == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0])
    assert projected(UNIFORM, -9.0) == pytest.approx([1.0, 0.0, 0.0, 0.0, 0.0])


def test_without_bootstrap_all_mass_is_split_around_the_reward():
    assert projected(UNIFORM, -0.75, bootstrap=0.0) == pytest.approx([0.0, 0.75, 0.25, 0.0, 0.0])


def test_a_reward_that_is_not_a_number_gives_a_target_that_is_not_one():
    assert all(math.isnan(mass) for mass in projected(UNIFORM, math.nan)[:2])


def test_rows_sum_to_one_and_keep_their_mean():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(50, 5, generator=generator).softmax(-1)
    reward = 0.2 * torch.rand(50, generator=generator)  # atoms stay within the support
    result = project(probabilities, reward, torch.full((50,), 0.8), LOW, HIGH)
    atoms = torch.linspace(LOW, HIGH, 5)
    torch.testing.assert_close(result.sum(-1), torch.ones(50))
    torch.testing.assert_close(result @ atoms, reward + 0.8 * (probabilities @ atoms))


def test_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [1.0, 1.0]])  # probabilities 1/4, 3/4 and 1/2, 1/2
    target = torch.tensor([[0.5, 0.5], [0.1, 0.9]])
    first = -0.5 * math.log(1 / 4) - 0.5 * math.log(3 / 4)
    assert cross_entropy(logits, target).item() == pytest.approx((first + math.log(2)) / 2)


def test_the_expected_value_by_hand():
    logits = torch.tensor([[0.0, math.log(2.0), 0.0, 0.0, math.log(3.0)]])  # 1/8, 2/8, 1/8, 1/8, 3/8
    assert expected_value(logits, LOW, HIGH).item() == pytest.approx((-2 - 2 + 0 + 1 + 6) / 8)
