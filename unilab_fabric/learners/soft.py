"""What every soft actor-critic computes, as pure functions; B is the batch."""

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


def temperature_gradient(log_prob: Tensor, temperature: Tensor, target_entropy: float) -> Tensor:
    """Derivative by log a of mean(-a (log pi + target entropy)), log_prob (B,); Haarnoja et al. 2018, equation 18."""
    return -temperature * (log_prob.mean() + target_entropy)
