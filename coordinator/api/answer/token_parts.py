"""Splits an answer into parts token by token, and counts the tokens of its reasoning."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import reduce
from itertools import pairwise
from operator import add

from coordinator.api.answer.choice import ChoiceDelta
from coordinator.text.parts import AnswerParts, Parts


class TokenParts:
    """The parts of one answer; use either `push` or `push_whole`."""

    def __init__(self, parts: AnswerParts) -> None:
        self.num_chars = 0  # of the text so far
        self._parts = parts
        self._offsets: Sequence[int] = ()  # characters before each token
        self._reasoning_end: int | None = None  # in tokens; None: it has not ended yet

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._parts.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens, including those of the marks."""
        if self._parts.is_reasoning:
            return len(self._offsets)
        return self._reasoning_end or 0

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside the arguments of a call."""
        return self._parts.is_in_call

    def push(self, delta: ChoiceDelta) -> Iterator[Parts]:
        """Yield the parts that are certain after each token of the delta's text.

        So their order is as they were written, however many tokens arrive together.
        """
        self._offsets = delta.token_offsets
        for text in self._cut(delta):
            was_reasoning = self._parts.is_reasoning
            parts = self._parts.push(text)
            self.num_chars += len(text)
            if (was_reasoning or parts.reasoning) and not self._parts.is_reasoning:
                self._reasoning_end = bisect_left(delta.token_offsets, self.num_chars)
            yield parts

    def push_whole(self, delta: ChoiceDelta) -> Parts:
        """Return the parts that are certain after the delta's text, by kind."""
        if not self._parts.may_reason:  # there is nothing more to count
            return self._parts.push(delta.text)
        return reduce(add, self.push(delta), Parts())

    def finish(self, last: ChoiceDelta) -> Parts:
        """End the answer; return the parts that were held back."""
        is_cut = last.finish_reason != "stop" or last.stop_reason is not None
        parts = self._parts.finish(is_cut=is_cut)
        if self._parts.num_late_chars:
            end = self.num_chars - self._parts.num_late_chars
            self._reasoning_end = bisect_left(self._offsets, end)
        return parts

    def _cut(self, delta: ChoiceDelta) -> Sequence[str]:
        """Cut the delta's text at token boundaries."""
        text, offsets, start = delta.text, delta.token_offsets, self.num_chars
        inner = offsets[bisect_right(offsets, start) : bisect_left(offsets, start + len(text))]
        cuts = [0, *(offset - start for offset in dict.fromkeys(inner)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if b > a]
