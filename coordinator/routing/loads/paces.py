"""How long a token of a stream takes beside what was predicted for it, by slot.

Predictions are of steps of one token each. With drafts a step may give a stream several, as often
as its text can be guessed. Promises are kept by the prediction, since that depends on no text; but
places are free sooner, and nodes less loaded.
"""

from __future__ import annotations

from typing import Final

_NEWEST: Final = 0.1  # weight of the newest stream in a moving average
_FEWEST: Final = 8  # tokens of a stream that tells something
_FASTEST: Final = 1 / 8


class StreamPaces:
    """Of each node's streams that have ended."""

    def __init__(self) -> None:
        self._shares: dict[int, float] = {}  # of the predicted time, by slot

    def share(self, slot: int) -> float:
        """Return the share of the predicted time that a token takes; 1 where none was seen."""
        return self._shares.get(slot, 1.0)

    def observe(self, slot: int, num_tokens: int, predicted_s: float, real_s: float) -> None:
        """Learn from a stream that has ended: both times are those of so many tokens.

        One that took longer than predicted counts as if it had not: what held it up may be gone.
        """
        if num_tokens < _FEWEST or predicted_s <= 0:
            return
        share = min(1.0, max(_FASTEST, real_s / predicted_s))
        before = self.share(slot)
        self._shares[slot] = before + _NEWEST * (share - before)

    def clear(self, slot: int) -> None:
        """Forget a lost node."""
        self._shares.pop(slot, None)
