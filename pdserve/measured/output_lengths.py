"""How long answers get: the one input that no model of the machine can predict.

`max_tokens` says little about how much a request will generate, except with `ignore_eos`, where the
two are equal. So it is the limit of a moving average over the answers that have ended: first over
all, then over those of requests of ever more the same kind (`kind_of`). Each average counts against
the wider one as its answers do against one more. Coordinators learn, and tell nodes what they
expect of each request; of others, a node has the average of its own answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import log2
from typing import Final, Literal, TypeAlias

from pdserve.protocol import SamplingParams

GUESS: Final = 256.0  # tokens; the initial mean, which counts as one answer
NEWEST: Final = 0.05  # weight of the answer that has just ended, after the first few
TAIL: Final = 0.25  # of the mean: still expected of an answer that is already longer than the mean
MOST_KINDS: Final = 32_768  # known at a time; the one that was not met for longest is forgotten
BEGINNINGS: Final = (64, 256, 1024)  # tokens of a prompt that may be those of others, too
_SIZES: Final = 2  # of prompts, for each power of two

Kind: TypeAlias = tuple[int, ...]
"""What a request has in common with fewer and fewer others."""


def kind_of(sender: tuple[str, ...], num_prompt: int, beginnings: Sequence[int]) -> Kind:
    """Return the kind of a request.

    Args:
        sender: who sent it for what: class, tenant, adapter.
        num_prompt: tokens of its prompt.
        beginnings: numbers that stand for the first `BEGINNINGS` tokens, as far as it has them.
    """
    size = round(_SIZES * log2(1 + num_prompt))
    known: list[tuple[object, ...]] = [sender, (sender, size)]
    for num_tokens, begins in zip(BEGINNINGS, beginnings, strict=False):
        if num_tokens <= num_prompt:  # of one that goes on, the answer may be among them
            known += [(sender, begins), (sender, size, begins)]
    return tuple(map(hash, known))


class _Mean:
    """A moving average."""

    __slots__ = ("num_answers", "tokens")

    def __init__(self, tokens: float) -> None:
        """`tokens` count as one answer."""
        self.tokens = tokens
        self.num_answers = 0

    def observe(self, num_tokens: int) -> None:
        self.num_answers += 1
        weight = max(NEWEST, 1 / (1 + self.num_answers))
        self.tokens += weight * (num_tokens - self.tokens)


class OutputLengths:
    """Expected output tokens."""

    def __init__(self, mean_tokens: float = GUESS) -> None:
        self._of_all = _Mean(mean_tokens)
        self._by_kind: dict[int, _Mean] = {}  # the one met last is the last one
        self.num_answers = 0
        # How far they were, all together, from what was expected, and from the mean of all.
        self.off_tokens: dict[Literal["kind", "mean"], float] = {"kind": 0.0, "mean": 0.0}

    @property
    def mean_tokens(self) -> float:
        """Of all answers."""
        return self._of_all.tokens

    def observe(self, num_tokens: int, kind: Kind = ()) -> None:
        """Update the means with an answer that finished normally."""
        self.num_answers += 1
        self.off_tokens["kind"] += abs(self.expected(kind) - num_tokens)
        self.off_tokens["mean"] += abs(self.mean_tokens - num_tokens)
        self._of_all.observe(num_tokens)
        wider = self._of_all.tokens
        for part in kind:
            mean = self._by_kind.pop(part, None) or _Mean(wider)
            mean.observe(num_tokens)
            self._by_kind[part] = mean
            wider = mean.tokens
        while len(self._by_kind) > MOST_KINDS:
            del self._by_kind[next(iter(self._by_kind))]

    def expected(self, kind: Kind) -> float:
        """Return the length that answers to requests of this kind are expected to have."""
        tokens = self._of_all.tokens
        for part in kind:
            mean = self._by_kind.get(part)
            if mean is not None:
                tokens += (mean.tokens - tokens) * mean.num_answers / (1 + mean.num_answers)
        return tokens


def remaining(expected: float, sampling: SamplingParams, num_so_far: int) -> float:
    """Return the tokens to come after the first `num_so_far` of an answer of an expected length.

    That is at most what may still come.
    """
    most = max(0, sampling.max_tokens - num_so_far)
    if sampling.ignore_eos:
        return most
    return min(most, max(expected - num_so_far, TAIL * expected))
