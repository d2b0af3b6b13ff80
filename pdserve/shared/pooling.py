"""Which of a prompt's final hidden states are averaged to make an embedding."""

from __future__ import annotations

from enum import IntEnum


class Pooling(IntEnum):
    """Selects tokens; the embedding is the mean of their states."""

    LAST = 1  # the last token, which attends to all others
    MEAN = 2  # all tokens
    FIRST = 3  # the first token ("cls")

    def positions(self, num_tokens: int) -> range:
        """Positions of the selected tokens in a prompt of `num_tokens`."""
        match self:
            case Pooling.LAST:
                return range(num_tokens - 1, num_tokens)
            case Pooling.MEAN:
                return range(num_tokens)
            case Pooling.FIRST:
                return range(1)
