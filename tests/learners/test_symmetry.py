import torch

from tests.learners.problems import CPU, batch, mirrors, spec
from unilab_fabric.learners.symmetry import MirrorHalf


def test_the_last_half_is_reflected_and_the_first_kept():
    task = spec(mirrors=mirrors())
    original = batch(task, rows=5)
    mirrored = MirrorHalf(task.mirrors, CPU)(original)
    for name in ("actor", "critic", "action", "next_actor", "next_critic"):
        rows, image = getattr(original, name), getattr(mirrored, name)
        assert torch.equal(image[:3], rows[:3])
        assert torch.equal(image[3:, 0], rows[3:, 1])
        assert torch.equal(image[3:, 1], rows[3:, 0])
        assert torch.equal(image[3:, 2:-1], rows[3:, 2:-1])
        assert torch.equal(image[3:, -1], -rows[3:, -1])


def test_rewards_and_ends_are_those_of_the_original():
    task = spec(mirrors=mirrors())
    original = batch(task)
    mirrored = MirrorHalf(task.mirrors, CPU)(original)
    assert mirrored.reward is original.reward
    assert mirrored.terminated is original.terminated
    assert mirrored.discount is original.discount
