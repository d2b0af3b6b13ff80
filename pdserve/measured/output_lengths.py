"""How long answers get: the one input that no model of the machine can predict.

`max_tokens` says little about how much a request will generate, except with `ignore_eos`, where the
two are equal. So it is the limit of a moving average over the answers that have ended. A
coordinator has one for the answers of its requests, a node one for its own.
"""

from __future__ import annotations

from typing import Final

from pdserve.protocol import SamplingParams

GUESS: Final = 256.0  # tokens; the initial mean, which counts as one answer
NEWEST: Final = 0.05  # weight of the answer that has just ended, after the first few
TAIL: Final = 0.25  # of the mean: still expected of an answer that is already longer than the mean


class OutputLengths:
    """Expected output tokens."""

    def __init__(self, mean_tokens: float = GUESS) -> None:
        self.mean_tokens = mean_tokens
        self._num_ended = 0

    def observe(self, num_tokens: int) -> None:
        """Update the mean with an answer that finished normally."""
        self._num_ended += 1
        weight = max(NEWEST, 1 / (1 + self._num_ended))
        self.mean_tokens += weight * (num_tokens - self.mean_tokens)

    def remaining(self, sampling: SamplingParams, num_so_far: int) -> float:
        """Return the tokens expected after the first `num_so_far`; at most what may still come."""
        most = max(0, sampling.max_tokens - num_so_far)
        if sampling.ignore_eos:
            return most
        return min(most, max(self.mean_tokens - num_so_far, TAIL * self.mean_tokens))
