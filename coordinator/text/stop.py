"""Stop strings in a text that arrives piece by piece.

The matcher shows text as early as it can: it holds back only what may still turn out to be the
beginning of a stop string. How the text is cut into pieces makes no difference: the match that is
completed first counts, and of several that end at one character the longest.
"""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feeds text through; ends at the first stop string."""

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        if not all(stops):
            raise ValueError("an empty stop string would match everywhere")
        self._stops = [_PartialMatch(stop) for stop in stops]
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    @property
    def matched(self) -> str | None:
        """The stop string that was found, if one was."""
        return self._matched

    def push(self, text: str) -> str:
        """Take the next piece; return what may be shown now. Nothing comes after a match."""
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
        """The text is over: what was held back can be shown after all."""
        held, self._held = self._held, ""
        return held


class _PartialMatch:
    """Knuth-Morris-Pratt: the longest beginning of `stop` that the text so far ends in."""

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
    """At i: length of the longest proper prefix of stop[: i + 1] that is also its suffix."""
    table = [0] * len(stop)
    length = 0
    for i in range(1, len(stop)):
        while length and stop[length] != stop[i]:
            length = table[length - 1]
        if stop[length] == stop[i]:
            length += 1
        table[i] = length
    return table
