"""When served tokens and log-probabilities are those of transformers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MARGIN: Final = 0.05  # between the two likeliest; below it, either may be chosen
TOLERANCE: Final = 0.02  # of a log-probability


@dataclass(frozen=True, slots=True)
class Expected:
    """What transformers says of one token, given those before it."""

    best: int  # the likeliest token
    margin: float  # of its log-probability over the second one's
    logprob: float  # of the token that is there


@dataclass(frozen=True, slots=True)
class Agreement:
    """How many tokens agree, and the largest difference of a log-probability."""

    tokens: int = 0
    decided: int = 0  # whose margin is large enough
    wrong: int = 0  # of these
    worst: float = 0.0

    def __add__(self, other: Agreement) -> Agreement:
        """Both together."""
        return Agreement(
            self.tokens + other.tokens,
            self.decided + other.decided,
            self.wrong + other.wrong,
            max(self.worst, other.worst),
        )

    @property
    def is_good(self) -> bool:
        """Whether anything was compared, and all agrees."""
        return self.tokens > 0 and self.wrong == 0 and self.worst <= TOLERANCE


def compare(
    token_ids: Sequence[int], logprobs: Sequence[float], expected: Sequence[Expected]
) -> Agreement:
    """Compare greedy tokens with what transformers says of each, after the same tokens."""
    decided = wrong = 0
    for token_id, reference in zip(token_ids, expected, strict=True):
        if reference.margin > MARGIN:
            decided += 1
            wrong += token_id != reference.best
    return Agreement(len(token_ids), decided, wrong, worst_of(logprobs, expected))


def worst_of(logprobs: Sequence[float], expected: Sequence[Expected]) -> float:
    """The largest difference; infinite if one is not a number."""
    pairs = zip(logprobs, expected, strict=True)
    differences = [abs(ours - reference.logprob) for ours, reference in pairs]
    return max((d if math.isfinite(d) else math.inf for d in differences), default=0.0)


def perplexity(logprobs: Sequence[float]) -> float:
    """Of a text, by the log-probabilities of its tokens."""
    return math.exp(-math.fsum(logprobs) / len(logprobs))
