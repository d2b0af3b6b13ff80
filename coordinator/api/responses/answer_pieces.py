"""Splits an answer into parts token by token, so that the result does not depend on batching.

Chat may collect the parts of a piece of text by kind; for items, their order matters.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from coordinator.api.answer.choice import ChoiceDelta, ScoredToken
from coordinator.text.parts import AnswerParts, Parts


@dataclass(slots=True)
class Piece:
    """The parts that some text was split into, and the tokens of that text."""

    parts: Parts
    tokens: list[ScoredToken]

    def takes(self, other: Piece) -> bool:
        """Return whether `other`, the next piece, can be merged into this one.

        That is so if both are only text or both are only reasoning.
        """
        kinds = [(bool(p.content), bool(p.reasoning)) for p in (self.parts, other.parts)]
        is_mixed = all(kinds[0]) or self.parts.calls or other.parts.calls
        return kinds[0] == kinds[1] and not is_mixed


class AnswerPieces:
    """Splits one answer into its pieces."""

    def __init__(self, parts: AnswerParts) -> None:
        self._parts = parts
        self._num_chars = 0  # characters of text processed so far
        self._num_tokens = 0
        self._reasoning_end: int | None = None  # in tokens; None: reasoning has not ended yet
        self._unshown: list[ScoredToken] = []  # tokens of text that is held back

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens, including those of the marks."""
        if self._reasoning_end is not None:
            return self._reasoning_end
        return self._num_tokens if self._parts.is_reasoning else 0

    def take_in(self, delta: ChoiceDelta) -> list[Piece]:
        """Process a delta and return the pieces that are certain now."""
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
        """Cut the delta's text at token boundaries."""
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
        """Return the tokens of `content`, which is the end of the text processed so far.

        Held-back tokens before it belong to marks, calls or reasoning.
        """
        if not content:
            return []
        start = self._num_chars - len(content)
        first = bisect_right(self._unshown, start, key=lambda token: token.offset) - 1
        return self._unshown[max(first, 0) :]
