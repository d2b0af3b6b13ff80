"""Finds stop strings in a text that arrives in pieces.

The matcher returns text as early as possible: it holds back only what may be the beginning of a
stop string. The result does not depend on how the text is cut into pieces: the match that is
completed first wins, and among several that end at the same character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through, up to the first stop string."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would match everywhere")
        self._stops = [_PartialMatch(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found; None if none was."""
        return self._matched

    def push(self, text: str) -> str:
        """Take the next piece; return the text that may be shown now: "" after a match."""
        if self._matched is not None:
            return ""
        if not self._stops:
            return text
        held = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            completed = [partial.stop for partial in self._stops if partial.advance(char)]
            if completed:
                self._matched = max(completed, key=len)
                self._held = ""
                return held[: end if self._include_stop else end - len(self._matched)]
        num_held = max(partial.length for partial in self._stops)
        self._held = held[len(held) - num_held :]
        return held[: len(held) - num_held]

    def finish(self) -> str:
        """End the text; return what was held back."""
        held, self._held = self._held, ""
        return held


class _PartialMatch:
    """Knuth-Morris-Pratt state: the longest prefix of `stop` that the text so far ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = _fallback_table(stop)

    def advance(self, char: str) -> bool:
        """Take one character; True when it completes the stop string."""
        while self.length and self.stop[self.length] != char:
            self.length = self._fallback[self.length - 1]
        if self.stop[self.length] == char:
            self.length += 1
        return self.length == len(self.stop)


def _fallback_table(stop: str) -> list[int]:
    """Return, for each i, the length of the longest proper prefix of stop[: i + 1] that is also its
    suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = table[length - 1]
        if stop[length] == stop[i]:
            length += 1
        table[i] = length
    return table
