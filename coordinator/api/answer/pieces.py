"""Splits an answer into pieces in the order in which they were written, each with its tokens.

Chat may collect the parts of a piece of text by kind; for items and blocks, their order matters.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from coordinator.api.answer.choice import ChoiceDelta, ScoredToken, TokenParts
from coordinator.text.parts import AnswerParts, Parts


@dataclass(slots=True)
class Piece:
    """Parts of one kind, and the tokens of their text."""

    parts: Parts
    tokens: list[ScoredToken]

    def takes(self, other: Piece) -> bool:
        """Return whether `other`, the next piece, can be merged into this one.

        That is so if both are only text of one phase, or both are only reasoning.
        """
        own, others = (
            (bool(p.content), bool(p.reasoning), p.phase) for p in (self.parts, other.parts)
        )
        return own == others and not (self.parts.calls or other.parts.calls)


class AnswerPieces:
    """Splits one answer into its pieces."""

    def __init__(self, parts: AnswerParts) -> None:
        self._parts = TokenParts(parts)
        self._unshown: list[ScoredToken] = []  # tokens of text that is held back

    @property
    def num_calls(self) -> int:
        """Number of calls so far."""
        return self._parts.num_calls

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of reasoning tokens, including those of the marks."""
        return self._parts.num_reasoning_tokens

    @property
    def is_in_call(self) -> bool:
        """Whether the answer ends inside the arguments of a call."""
        return self._parts.is_in_call

    def take_in(self, delta: ChoiceDelta) -> list[Piece]:
        """Process a delta and return the pieces that are certain now."""
        pieces: list[Piece] = []
        tokens = list(delta.tokens)
        for parts in self._parts.push(delta):
            while tokens and tokens[0].offset < self._parts.num_chars:
                self._unshown.append(tokens.pop(0))
            self._add(pieces, parts)
        self._unshown += tokens
        if delta.finish_reason is not None:
            self._add(pieces, self._parts.finish(delta))
        return pieces

    def _add(self, pieces: list[Piece], parts: Parts) -> None:
        if not parts:
            return
        tokens, self._unshown = self._tokens_of(parts.content), []
        for part in _in_order(parts):
            piece = Piece(part, [])
            if part.content:  # the first text has the tokens of all that comes together
                piece.tokens, tokens = tokens, []
            if pieces and pieces[-1].takes(piece):
                pieces[-1].parts += part
                pieces[-1].tokens += piece.tokens
            else:
                pieces.append(piece)

    def _tokens_of(self, content: str) -> list[ScoredToken]:
        """Return the tokens of `content`, which is the end of the text processed so far.

        Held-back tokens before it belong to marks, calls or reasoning.
        """
        if not content:
            return []
        start = self._parts.num_chars - len(content)
        first = bisect_right(self._unshown, start, key=lambda token: token.offset) - 1
        return self._unshown[max(first, 0) :]


def _in_order(parts: Parts) -> Iterator[Parts]:
    """Yield parts of one kind each, as they were written."""
    if parts.reasoning:
        yield Parts(reasoning=parts.reasoning)
    told = 0  # characters
    for call in parts.calls:
        if content := parts.content[told : call.at]:
            yield Parts(content, phase=parts.phase)
            told = call.at
        yield Parts(calls=[call])
    if content := parts.content[told:]:
        yield Parts(content, phase=parts.phase)
