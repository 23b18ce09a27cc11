"""Where in a motion episodes begin."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from unilab_fabric.errors import UserError

Frames = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Where in a motion episodes begin."""

    mode: Literal["adaptive", "mixed"] = "adaptive"
    """adaptive: more often where episodes have failed, by bins of a second; mixed: at a clip's start or anywhere."""
    start_ratio: float = 0.0
    """mixed: share of the episodes that begin with the first frame of a clip; the others begin anywhere alike."""
    lookahead: int = 1
    """adaptive: bins that a failure counts in, its own and those before it; 1 for its own alone."""
    lookahead_decay: float = 0.8
    """adaptive: what it counts in each further one of them, as a share of the one behind."""

    def __post_init__(self) -> None:
        if self.mode not in ("adaptive", "mixed"):
            raise UserError("task.sampling.mode", self.mode, "allowed: adaptive or mixed")
        if not 0 <= self.start_ratio <= 1:
            raise UserError("task.sampling.start_ratio", self.start_ratio, "allowed: 0 to 1")
        if self.lookahead < 1:
            raise UserError("task.sampling.lookahead", self.lookahead, "allowed: 1 or more")
        if not 0 < self.lookahead_decay <= 1:
            raise UserError("task.sampling.lookahead_decay", self.lookahead_decay, "allowed: more than 0, up to 1")


class FrameSampler:
    """Draws first frames, and learns where episodes fail."""

    DECAY = 0.001
    FLOOR = 0.1

    def __init__(self, sampling: Sampling, last: Frames, step_s: float) -> None:
        """`last` (T,) is the last frame of the clip that each frame belongs to, `step_s` the time of a frame [s]."""
        self._sampling = sampling
        self.frames = len(last)
        self.starts = np.unique(last, return_index=True)[1]
        """(clips,): the first frame of each clip."""
        self.bins = int(self.frames * step_s) + 1
        self.failures = np.zeros(self.bins)
        """Decaying count of failures by bin."""

    def probabilities(self) -> NDArray[np.float64]:
        """(bins,): of an episode to begin there, in the mode adaptive.

        Failures and a floor over all bins; bin b then takes its share of the bins b + i, with weight decay^i, the last
        bin standing for those that would be behind it: Liao et al. 2025, "BeyondMimic", adaptive sampling.
        """
        weights = self.failures + self.FLOOR / self.bins
        ahead = self._sampling.lookahead
        if ahead > 1:
            kernel = self._sampling.lookahead_decay ** np.arange(ahead)
            padded = np.concatenate([weights, np.full(ahead - 1, weights[-1])])
            weights = np.lib.stride_tricks.sliding_window_view(padded, ahead) @ kernel
        shares: NDArray[np.float64] = weights / weights.sum()
        return shares

    def note(self, failed_at: Frames) -> None:
        """Takes note of the frames at which episodes failed in one tick; nothing if there is none."""
        if failed_at.size:
            where = np.minimum(failed_at * self.bins // max(self.frames - 1, 1), self.bins - 1)
            counts = np.bincount(where, minlength=self.bins)
            self.failures *= 1 - self.DECAY
            self.failures += self.DECAY * counts

    def draw(self, rng: np.random.Generator, n: int) -> Frames:
        """First frames of n episodes."""
        if self._sampling.mode == "mixed":
            anywhere = rng.integers(0, self.frames, n)
            if self._sampling.start_ratio == 0:
                return anywhere
            starts = self.starts[rng.integers(0, len(self.starts), n)]
            return np.where(rng.random(n) < self._sampling.start_ratio, starts, anywhere)
        chosen = np.searchsorted(self.probabilities().cumsum(), rng.random(n) * (1 - 1e-12))
        place = (np.minimum(chosen, self.bins - 1) + rng.random(n)) / self.bins
        return np.asarray(place * (self.frames - 1), np.int64)
