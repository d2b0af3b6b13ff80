"""The interface of parsers that separate an answer's text into its parts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call. A call's pieces are consecutive; their arguments are concatenated."""

    index: int  # of the call in the answer
    name: str | None  # in the first piece only
    arguments: str  # JSON text


@dataclass(slots=True)
class Parts:
    """The parts that were found in a piece of text."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    @property
    def is_content_only(self) -> bool:
        """Whether there is neither reasoning nor a call."""
        return not (self.reasoning or self.calls)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: Parts) -> Parts:
        """Return the parts of both; two pieces of one call become one, as clients expect."""
        calls = list(self.calls)
        for piece in other.calls:
            if calls and piece.name is None and piece.index == calls[-1].index:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.arguments)
            else:
                calls.append(piece)
        return Parts(self.content + other.content, self.reasoning + other.reasoning, calls)


class PartsParser(Protocol):
    """Takes an answer's text in pieces; the result does not depend on how the text is cut."""

    def push(self, text: str) -> Parts:
        """Take the next piece of text; return the parts that are certain now."""
        ...

    def finish(self) -> Parts:
        """End the text; return what was held back as its most likely kind of part."""
        ...


def held_length(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
