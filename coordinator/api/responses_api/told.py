"""An answer's text told apart token by token, so that nothing depends on how tokens came.

Chat may collect what a piece of text turned out to be; items have an order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordinator.api.choice import ChoiceDelta, ScoredToken
from coordinator.text.parts import AnswerParts, Parts


@dataclass(slots=True)
class Piece:
    """What some text turned out to be, and the tokens of that text."""

    parts: Parts
    tokens: list[ScoredToken]

    def takes(self, other: Piece) -> bool:
        """Whether the other one, which follows it, is more of the same: text or reasoning."""
        kinds = [(bool(p.content), bool(p.reasoning)) for p in (self.parts, other.parts)]
        is_mixed = all(kinds[0]) or self.parts.calls or other.parts.calls
        return kinds[0] == kinds[1] and not is_mixed


class ToldApart:
    """One answer."""

    def __init__(self, parts: AnswerParts) -> None:
        self._parts = parts
        self._num_chars = 0  # of text that was taken in
        self._num_tokens = 0
        self._reasoning_end: int | None = None  # in tokens; None: it has not ended yet
        self._unshown: list[ScoredToken] = []  # of text that is held back

    @property
    def num_reasoning_tokens(self) -> int:
        """Those of the marks included."""
        if self._reasoning_end is not None:
            return self._reasoning_end
        return self._num_tokens if self._parts.is_reasoning else 0

    def take_in(self, delta: ChoiceDelta) -> list[Piece]:
        """What is certain now."""
        self._num_tokens = len(delta.token_offsets)
        pieces: list[Piece] = []
        tokens = list(delta.tokens)
        for text in self._cut(delta):
            was_reasoning = self._parts.is_reasoning
            parts = self._parts.push(text)
            self._num_chars += len(text)
            if (was_reasoning or parts.reasoning) and not self._parts.is_reasoning:
                self._reasoning_end = bisect_left(delta.token_offsets, self._num_chars)
            while tokens and tokens[0].offset < self._num_chars:
                self._unshown.append(tokens.pop(0))
            self._add(pieces, parts)
        self._unshown += tokens
        if delta.finish_reason is not None:
            self._add(pieces, self._parts.finish())
        return pieces

    def _cut(self, delta: ChoiceDelta) -> Sequence[str]:
        """At the beginnings of tokens."""
        text, offsets, start = delta.text, delta.token_offsets, self._num_chars
        inner = offsets[bisect_right(offsets, start) : bisect_left(offsets, start + len(text))]
        cuts = [0, *(offset - start for offset in dict.fromkeys(inner)), len(text)]
        return [text[a:b] for a, b in pairwise(cuts) if b > a]

    def _add(self, pieces: list[Piece], parts: Parts) -> None:
        if not parts:
            return
        piece = Piece(parts, self._tokens_of(parts.content))
        self._unshown = []
        if pieces and pieces[-1].takes(piece):
            pieces[-1].parts += parts
            pieces[-1].tokens += piece.tokens
        else:
            pieces.append(piece)

    def _tokens_of(self, content: str) -> list[ScoredToken]:
        """It is the end of the text so far. What came before were marks, calls or reasoning."""
        if not content:
            return []
        start = self._num_chars - len(content)
        first = bisect_right(self._unshown, start, key=lambda token: token.offset) - 1
        return self._unshown[max(first, 0) :]
