"""The seam between an answer's text and the formats in which models write tool calls."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, slots=True)
class CallPiece:
    """Some of a tool call. The pieces of one call follow each other; their arguments add up."""

    index: int  # of the call in the answer
    name: str | None  # in the first piece only
    arguments: str  # JSON text


@dataclass(slots=True)
class Parts:
    """What a piece of text turned out to be."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    @property
    def is_content_only(self) -> bool:
        """Whether it is text and nothing else."""
        return not (self.reasoning or self.calls)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def __add__(self, other: Parts) -> Parts:
        return Parts(
            self.content + other.content,
            self.reasoning + other.reasoning,
            self.calls + other.calls,
        )


class PartsParser(Protocol):
    """Fed an answer's text in any pieces; what comes out does not depend on how it was cut."""

    def push(self, text: str) -> Parts:
        """Take the next piece; return what is certain now."""
        ...

    def finish(self) -> Parts:
        """The text is over: what was held back shows as what it is most likely."""
        ...


def held_length(text: str, marker: str) -> int:
    """Length of the longest end of `text` that may be the beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0
