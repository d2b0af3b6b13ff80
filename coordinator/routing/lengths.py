"""How long answers are: the mean of those that have ended, the latest counting most.

What a request may generate at most says little of what it will; only with `ignore_eos` it is the
same. (An answer's length is the one thing that no model of the machine can know.)
"""

from __future__ import annotations

from pdserve.protocol import SamplingParams

NEWEST = 0.05  # weight of the answer that has just ended
GUESS = 128.0  # tokens; until some have ended
TAIL = 0.25  # of the mean: expected still of an answer that is longer than the mean already


class OutputLengths:
    """Expected output tokens."""

    def __init__(self) -> None:
        self._mean = GUESS

    def observe(self, num_tokens: int) -> None:
        """An answer has ended by itself."""
        self._mean += NEWEST * (num_tokens - self._mean)

    def expected(self, sampling: SamplingParams) -> int:
        """Of a request that begins; at least 1."""
        return self.remaining(sampling, 0)

    def remaining(self, sampling: SamplingParams, num_done: int) -> int:
        """Still to come of a request that has `num_done` tokens; at least 1."""
        left = sampling.max_tokens - num_done
        if not sampling.ignore_eos:
            left = min(left, round(max(self._mean - num_done, TAIL * self._mean)))
        return max(left, 1)
