"""Expected answer lengths: a moving average over the answers that have ended.

`max_tokens` says little about how much a request will generate, except with `ignore_eos`, where the
two are equal. (The answer's length is the one input that no model of the machine can predict.)
"""

from __future__ import annotations

from pdserve.protocol import SamplingParams

NEWEST = 0.05  # weight of the answer that has just ended
GUESS = 128.0  # tokens; the initial mean
TAIL = 0.25  # of the mean: still expected of an answer that is already longer than the mean


class OutputLengths:
    """Expected output tokens."""

    def __init__(self) -> None:
        self._mean = GUESS

    def observe(self, num_tokens: int) -> None:
        """Update the mean with an answer that finished normally."""
        self._mean += NEWEST * (num_tokens - self._mean)

    def expected(self, sampling: SamplingParams) -> int:
        """Return the expected output tokens of a new request; at least 1."""
        return self.remaining(sampling, 0)

    def remaining(self, sampling: SamplingParams, num_done: int) -> int:
        """Return the tokens expected after the first `num_done`; at least 1."""
        left = sampling.max_tokens - num_done
        if not sampling.ignore_eos:
            left = min(left, round(max(self._mean - num_done, TAIL * self._mean)))
        return max(left, 1)
