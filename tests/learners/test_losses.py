import math

import pytest
import torch

from unilab_fabric.learners.fast_sac.losses import (
    actor_loss,
    categorical_loss,
    project,
    shifted_atoms,
    temperature_gradient,
)

ATOMS = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])


def moved(reward, *, discount=1.0, terminated=False, log_prob=0.0, temperature=0.0):
    return shifted_atoms(
        ATOMS,
        torch.tensor([reward]),
        torch.tensor([terminated]),
        torch.tensor([discount]),
        torch.tensor([log_prob]),
        torch.tensor(temperature),
    )


def projected(probabilities, atoms):
    return project(torch.tensor([[probabilities]]), atoms, ATOMS)[0, 0].tolist()


def test_atoms_move_by_reward_discount_and_entropy():
    # r + d (z - a log pi) = 0.5 + 0.5 (z + 0.1 * 4)
    expected = [[-0.3, 0.2, 0.7, 1.2, 1.7]]
    torch.testing.assert_close(
        moved(0.5, discount=0.5, log_prob=-4.0, temperature=0.1), torch.tensor(expected), atol=1e-6, rtol=0.0
    )


def test_a_termination_leaves_only_the_reward():
    actual = moved(0.5, discount=0.5, terminated=True, log_prob=-4.0, temperature=0.1)
    assert actual.tolist() == [[0.5] * 5]


def test_atoms_are_clipped_to_the_support():
    assert moved(1.5).tolist() == [[-0.5, 0.5, 1.5, 2.0, 2.0]]


@pytest.mark.parametrize("atom", range(5))
def test_a_distribution_that_does_not_move_stays(atom):
    one_hot = [float(k == atom) for k in range(5)]
    assert projected(one_hot, moved(0.0)) == one_hot


def test_mass_between_two_atoms_is_split_by_distance():
    assert projected([0.0, 1.0, 0.0, 0.0, 0.0], moved(0.25)) == [0.0, 0.75, 0.25, 0.0, 0.0]


def test_a_reward_beyond_the_support_puts_everything_on_the_last_atom():
    assert projected([0.2] * 5, moved(9.0)) == pytest.approx([0.0, 0.0, 0.0, 0.0, 1.0])


def test_a_terminated_row_is_split_around_its_reward():
    assert projected([0.2] * 5, moved(-0.75, terminated=True)) == pytest.approx([0.0, 0.75, 0.25, 0.0, 0.0])


def test_a_reward_that_is_not_a_number_gives_a_target_that_is_not_one():
    assert all(math.isnan(mass) for mass in projected([0.2] * 5, moved(math.nan))[:2])


def test_rows_of_every_critic_sum_to_one_and_keep_their_mean():
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(2, 50, 5, generator=generator).softmax(-1)
    reward = 0.2 * torch.rand(50, generator=generator)
    zeros = torch.zeros(50)
    atoms = shifted_atoms(ATOMS, reward, zeros.bool(), zeros + 0.8, zeros, torch.tensor(0.0))  # within the support
    result = project(probabilities, atoms, ATOMS)
    torch.testing.assert_close(result.sum(-1), torch.ones(2, 50))
    torch.testing.assert_close(result @ ATOMS, reward + 0.8 * (probabilities @ ATOMS))


def test_the_critic_loss_sums_critics_and_averages_rows():
    # uniform logits over 5 atoms: cross-entropy log 5 for any target
    logits = torch.zeros(2, 3, 5)
    target = torch.softmax(torch.arange(30.0).view(2, 3, 5), -1)
    assert categorical_loss(logits, target).item() == pytest.approx(2 * math.log(5))


def test_the_critic_loss_by_hand():
    logits = torch.tensor([[[0.0, math.log(3.0)]]])  # probabilities 1/4, 3/4
    target = torch.tensor([[[0.5, 0.5]]])
    assert categorical_loss(logits, target).item() == pytest.approx(-0.5 * math.log(1 / 4) - 0.5 * math.log(3 / 4))


def test_the_actor_loss_takes_the_mean_over_critics():
    log_prob = torch.tensor([1.0, 3.0])
    value = torch.tensor([[1.0, 2.0], [5.0, 8.0]])
    # row 0: 0.1 * 1 - 3, row 1: 0.1 * 3 - 5
    assert actor_loss(log_prob, value, torch.tensor(0.1)).item() == pytest.approx((0.1 - 3 + 0.3 - 5) / 2)


def test_the_temperature_gradient_is_that_of_the_objective():
    log_temperature = torch.tensor(-1.0, requires_grad=True)
    log_prob = torch.tensor([0.5, -2.0, 3.0])
    (-log_temperature.exp() * (log_prob - 1.5)).mean().backward()
    actual = temperature_gradient(log_prob, log_temperature.detach().exp(), -1.5)
    torch.testing.assert_close(actual, log_temperature.grad)


@pytest.mark.parametrize(("entropy", "rises"), [(-2.0, True), (-0.5, False)])
def test_the_temperature_rises_exactly_when_entropy_is_below_its_target(entropy, rises):
    gradient = temperature_gradient(torch.full((4,), -entropy), torch.tensor(0.1), target_entropy=-1.0)
    assert (gradient.item() < 0) is rises
