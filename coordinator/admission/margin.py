"""A learned safety factor on predictions.

A prediction that is right on average is too low for half of the requests. So the factor tracks a
quantile of real / predicted instead of the mean: it grows when a real time exceeds prediction times
factor, and shrinks otherwise. The ratio of the two steps makes it settle where `QUANTILE` of the
real times are within it (stochastic approximation; Robbins and Monro).
"""

from __future__ import annotations

QUANTILE = 0.9  # SLO attainment is commonly asked for at 90 % (DistServe)
STEP = 0.05
LOWEST = 0.7  # bounds, so that a few outliers neither admit nor refuse everything
HIGHEST = 2.0


class Margin:
    """The factor for predictions of one kind."""

    def __init__(self, highest: float = HIGHEST) -> None:
        self.factor = 1.0
        self._highest = highest

    def learn(self, predicted_s: float, real_s: float) -> None:
        """Update the factor with a predicted and a real time."""
        exceeded = real_s > predicted_s * self.factor
        self.factor *= 1 + STEP * (QUANTILE if exceeded else QUANTILE - 1)
        self.factor = min(max(self.factor, LOWEST), self._highest)
