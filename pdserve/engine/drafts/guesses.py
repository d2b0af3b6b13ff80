"""What one stream may say next, and how often that was right."""

from __future__ import annotations

from typing import Final

from pdserve._native import TextIndex

# By how many tokens a place of the text reads as its end does: the longer, the surer.
_LONGER: Final = (6, 12)
_FIRST: Final = (0.55, 0.75, 0.9)  # shares of right drafts, before any was tried
_TRUST: Final = 4.0  # drafts for which the share before counts
_KEPT: Final = 0.9  # weight of what was known, with each step that tries drafts
_FORGOTTEN: Final = 0.99  # the same, with each step whose drafts are not worth trying


class Shares:
    """Shares of right drafts by the length of the match, of late."""

    def __init__(self, before: Shares | None = None) -> None:
        """`before`: of others, for what is not known yet."""
        self._before = before
        self._tried = [0.0] * len(_FIRST)
        self._right = [0.0] * len(_FIRST)

    def of(self, matched: int) -> float:
        """The share of right drafts behind a match of so many tokens."""
        kind = _kind(matched)
        before = _FIRST[kind] if self._before is None else self._before.of(matched)
        return (self._right[kind] + _TRUST * before) / (self._tried[kind] + _TRUST)

    def add(self, matched: int, tried: int, right: int) -> None:
        """Learn from drafts that were compared."""
        kind = _kind(matched)
        self._tried[kind] = _KEPT * self._tried[kind] + tried
        self._right[kind] = _KEPT * self._right[kind] + right

    def forget(self, matched: int) -> None:
        """Trust a little less in what is known: nothing is learnt while nothing is tried."""
        kind = _kind(matched)
        self._tried[kind] *= _FORGOTTEN
        self._right[kind] *= _FORGOTTEN


class DraftCounts:
    """What has come of all drafts of a node."""

    def __init__(self) -> None:
        self.drafted = 0  # tokens
        self.accepted = 0
        self.shares = Shares()


class Guesses:
    """The drafts of one stream, from its own text."""

    def __init__(self, counts: DraftCounts) -> None:
        self._counts = counts
        self._shares = Shares(counts.shares)
        self._matched = 0  # by the last proposal that was taken up
        self.propose = TextIndex().propose  # no call of Python's: it is asked at each step

    def likely(self, matched: int) -> float:
        """How likely each token of a proposal is right, if those before it are."""
        self._matched = matched
        return self._shares.of(matched)

    def untried(self) -> None:
        """Note that the last proposal was not worth a try."""
        self._shares.forget(self._matched)

    def compared(self, num_drafts: int, num_right: int) -> None:
        """Note what came of the last proposal: of its first tokens, so many were right."""
        num_compared = min(num_drafts, num_right + 1)
        self._shares.add(self._matched, num_compared, num_right)
        self._counts.shares.add(self._matched, num_compared, num_right)
        self._counts.drafted += num_drafts
        self._counts.accepted += num_right


def _kind(matched: int) -> int:
    return sum(matched >= longer for longer in _LONGER)
