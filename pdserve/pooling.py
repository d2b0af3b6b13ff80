"""Which of a prompt's final hidden states an embedding is made of."""

from __future__ import annotations

from enum import IntEnum


class Pooling(IntEnum):
    """The embedding is their mean."""

    LAST = 1  # the last token's, which has seen all others
    MEAN = 2  # every token's
    FIRST = 3  # the first token's

    def positions(self, num_tokens: int) -> range:
        """The tokens whose states they are, in a prompt of so many."""
        match self:
            case Pooling.LAST:
                return range(num_tokens - 1, num_tokens)
            case Pooling.MEAN:
                return range(num_tokens)
            case Pooling.FIRST:
                return range(1)
