"""The actor's objective of FastSAC; what other learners share is in `learners/soft.py` and `categorical.py`."""

from collections.abc import Sequence

from torch import Tensor


def actor_loss(log_prob: Tensor, values: Sequence[Tensor], temperature: Tensor) -> Tensor:
    """mean(a log pi(a|o) - Q), Q the mean over critics: (B,), (B,) for each critic, scalar.

    Haarnoja et al. 2018, equation 7, with the mean in place of the minimum.
    """
    return (temperature * log_prob - sum(values[1:], values[0]) / len(values)).mean()
