"""The objectives of FastSAC as pure functions; B is the batch. The critics' loss is in `learners/categorical.py`."""

from collections.abc import Sequence

from torch import Tensor


def soft_bellman(
    reward: Tensor, terminated: Tensor, discount: Tensor, next_log_prob: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """The soft Bellman operator as z -> soft_reward + bootstrap z, both (B,); Haarnoja et al. 2018, section 4.1.

    All arguments are (B,) but the scalar temperature. Only `terminated` cuts the bootstrap: a time-out ends the
    episode, not the return.
    """
    bootstrap = discount * ~terminated
    return reward - bootstrap * temperature * next_log_prob, bootstrap


def actor_loss(log_prob: Tensor, values: Sequence[Tensor], temperature: Tensor) -> Tensor:
    """mean(a log pi(a|o) - Q), Q the mean over critics: (B,), (B,) for each critic, scalar.

    Haarnoja et al. 2018, equation 7, with the mean in place of the minimum.
    """
    return (temperature * log_prob - sum(values[1:], values[0]) / len(values)).mean()


def temperature_gradient(log_prob: Tensor, temperature: Tensor, target_entropy: float) -> Tensor:
    """Derivative by log a of mean(-a (log pi + target entropy)), log_prob (B,); Haarnoja et al. 2018, equation 18."""
    return -temperature * (log_prob.mean() + target_entropy)
