"""The interface of parsers that separate an answer's text into its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

SPACE = " \t\r\n"
Phase = Literal["commentary", "final_answer"]  # of content: on the way to an answer, or the answer
Tools = Mapping[str, Mapping[str, Any]]  # name of an offered function |-> schema of its arguments


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a tool call. A call's pieces are consecutive; their arguments are concatenated."""

    index: int  # of the call in the answer
    name: str | None  # in the first piece only
    arguments: str  # JSON text
    call_id: str | None = None  # in the first piece, if the model wrote one
    at: int = field(default=0, compare=False)  # characters of the same Parts' content before it


@dataclass(slots=True)
class Parts:
    """The parts that were found in a piece of text: reasoning, then content with calls in it."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    phase: Phase | None = None  # of the last content; None: the format tells none

    @property
    def is_content_only(self) -> bool:
        """Whether there is neither reasoning nor a call."""
        return not (self.reasoning or self.calls)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)

    def called(
        self, index: int, name: str | None, arguments: str, call_id: str | None = None
    ) -> None:
        """Add a piece of a call, behind the content so far."""
        self.calls.append(CallPiece(index, name, arguments, call_id, len(self.content)))

    def __add__(self, other: Parts) -> Parts:
        """Return the parts of both; two pieces of one call become one, as clients expect."""
        calls, before = list(self.calls), len(self.content)
        for piece in other.calls:
            if calls and piece.name is None and piece.index == calls[-1].index:
                calls[-1] = replace(calls[-1], arguments=calls[-1].arguments + piece.arguments)
            else:
                calls.append(replace(piece, at=before + piece.at) if before else piece)
        phase = other.phase if other.content else self.phase
        return Parts(self.content + other.content, self.reasoning + other.reasoning, calls, phase)


class PartsParser(Protocol):
    """Takes an answer's text in pieces; the result does not depend on how the text is cut."""

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside the arguments of a call."""
        ...

    def push(self, text: str) -> Parts:
        """Take the next piece of text; return the parts that are certain now."""
        ...

    def finish(self, *, is_cut: bool = False) -> Parts:
        """End the text; return what was held back as its most likely kind of part.

        `is_cut`: a limit or a stop string ended it, and not the model.
        """
        ...


class FindsContent(Protocol):
    """Tells where the content of an answer begins, for what counts in content only."""

    def push(self, text: str) -> tuple[str, str]:
        """Return the text that precedes the content, and the content, as far as it is known."""
        ...

    def finish(self) -> str:
        """End the text; return what was not known: it is content."""
        ...


class NotACall(Exception):  # control flow inside this package only
    """What was read so far is no tool call."""


class CallReader(Protocol):
    """Reads one call, character by character, in one format."""

    name: str | None  # of the function, once it is certain that this is a call of it
    call_id: str | None  # that the model wrote before the arguments
    is_refused: bool  # it is no call, but the text up to its end belongs together
    is_complete: bool  # its last character was read
    has_arguments: bool  # all of its arguments were read

    @property
    def unread(self) -> str:
        """Its last characters, which are not certain to belong to it."""
        ...

    def push(self, char: str) -> bool:
        """Take one character; False: the call ended before it. Raises NotACall."""
        ...

    def take(self) -> str:
        """Return further JSON text of the arguments, once `name` is known."""
        ...

    def finish(self, *, is_cut: bool) -> str:
        """End the text; return what was held back of the arguments."""
        ...


def held_length(text: str, marker: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[len(text) - length :]):
            return length
    return 0


def first_mark(text: str, marks: Sequence[str]) -> tuple[int, str]:
    """Return where the first of the marks is in a text, and which it is.

    If there is none: where the text may end in the beginning of one, and "".
    """
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        return min(found)
    return len(text) - max(held_length(text, mark) for mark in marks), ""
