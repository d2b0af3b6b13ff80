"""How much worse than predicted things turn out: a factor that is learned.

A prediction that is right on average is too low for half of the requests. So the factor follows a
quantile of real / predicted and not the mean: it grows when something took longer than the factor
allowed for, and shrinks when it did not, in such a ratio that it comes to rest where `QUANTILE` of
them keep within it (stochastic approximation; Robbins and Monro).
"""

from __future__ import annotations

QUANTILE = 0.9  # SLO attainment is commonly asked for at 90 % (DistServe)
STEP = 0.05
LOWEST = 0.7  # a few odd requests must neither tear the door open nor shut it
HIGHEST = 2.0


class Margin:
    """One factor to put on predictions of one kind."""

    def __init__(self, highest: float = HIGHEST) -> None:
        self.factor = 1.0
        self._highest = highest

    def learn(self, predicted_s: float, real_s: float) -> None:
        """Something that was predicted has happened."""
        exceeded = real_s > predicted_s * self.factor
        self.factor *= 1 + STEP * (QUANTILE if exceeded else QUANTILE - 1)
        self.factor = min(max(self.factor, LOWEST), self._highest)
