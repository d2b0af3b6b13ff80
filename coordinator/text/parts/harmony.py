"""Separates the channels of an answer in the harmony format, which gpt-oss writes.

    <|channel|>analysis<|message|>...<|end|>                                  reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}
    <|start|>assistant<|channel|>final<|message|>...                          content

The prompt ends with `<|start|>assistant`. A comment that is for no function is content, as the user
is meant to see it. So is text without a header.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from coordinator.text.parts.interface import (
    SPACE,
    Parts,
    Phase,
    Tools,
    first_mark,
    held_length,
)

START, CHANNEL, MESSAGE, CONSTRAIN, END = (
    f"<|{mark}|>" for mark in ("start", "channel", "message", "constrain", "end")
)
MARKS: Final = (START, CHANNEL, MESSAGE, CONSTRAIN, END, "<|call|>", "<|return|>")
_ENDS: Final = (END, "<|call|>", "<|return|>", START, CHANNEL)  # a message; two begin a header
_BEGINS: Final = (START, CHANNEL, MESSAGE, " to=")  # a header
_CHANNEL: Final = re.compile(re.escape(CHANNEL) + r"\s*(\w+)")
_RECIPIENT: Final = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")
_FINAL: Final = f"{CHANNEL}final"
_PHASES: Final[dict[str, Phase]] = {"commentary": "commentary", "final": "final_answer"}
_MOST_HEADER: Final = 512  # characters; what is longer is none


class _Kind(Enum):
    """What a message is."""

    CONTENT = auto()
    REASONING = auto()
    CALL = auto()


class Harmony:
    """A PartsParser that finds reasoning, too.

    Args:
        tools: the offered functions; what is for another one is content.
        is_apart: reasoning is not content.
        is_shown: whether reasoning is returned; otherwise it is dropped.
        is_streamed: whether it is returned as it comes; otherwise each message at its end.
        has_begun: the prompt ends inside the content.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        is_apart: bool = True,
        is_shown: bool = True,
        is_streamed: bool = True,
        has_begun: bool = False,
    ) -> None:
        self._tools = tools
        self._is_apart = is_apart
        self._is_shown = is_shown
        self._is_streamed = is_streamed
        self._kind = _Kind.CONTENT if has_begun else None  # of the message; None: in a header
        self._phase: Phase | None = "final_answer" if has_begun else None
        self._rest = ""
        self._kept = ""  # reasoning so far that is not streamed
        self._num_calls = 0
        self._name: str | None = None  # of the function that is called, until it is returned
        self.may_reason = not has_begun  # or the text may go on with reasoning

    @property
    def is_reasoning(self) -> bool:
        """Whether the text ends inside reasoning."""
        return self._kind is _Kind.REASONING

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside the arguments of a call."""
        return self._kind is _Kind.CALL

    def push(self, text: str) -> Parts:
        """Take the next piece of text; return the parts that are certain now."""
        self._rest += text
        parts = Parts()
        while self._rest and self._step(parts):
            pass
        return parts

    def finish(self, *, is_cut: bool = False) -> Parts:
        """End the text; return what was held back as its most likely kind of part."""
        parts = Parts()
        rest, self._rest = self._rest, ""
        if self._kind is not None:
            self._add(rest if self._kind is not _Kind.CALL else "", parts)
            self._end(parts, is_cut=is_cut)
        elif not rest.lstrip("\n").startswith((START, CHANNEL, MESSAGE)):
            parts.content += rest
        return parts

    def _step(self, parts: Parts) -> bool:
        """Take some of the rest; False if more text is needed."""
        if self._kind is None:
            return self._read_header()
        at, mark = first_mark(self._rest, _ENDS)
        self._add(self._rest[:at], parts)
        if not mark:
            self._rest = self._rest[at:]
            return False
        self._end(parts)
        self._rest = self._rest[at if mark in _BEGINS else at + len(mark) :]
        return True

    def _read_header(self) -> bool:
        header, mark, body = self._rest.partition(MESSAGE)
        if not mark and _may_begin(header) and len(header) <= _MOST_HEADER:
            return False
        if not mark or not _may_begin(header + mark):
            self._kind, self._phase = _Kind.CONTENT, None
            return True
        self._rest = body
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        if recipient is not None and recipient[1] in self._tools:
            self._kind, self._name = _Kind.CALL, recipient[1]
        elif channel is not None and channel[1] == "analysis" and self._is_apart:
            self._kind = _Kind.REASONING
        else:
            self._kind = _Kind.CONTENT
            self._phase = None if channel is None else _PHASES.get(channel[1])
            self.may_reason &= channel is None or channel[1] != "final"
        return True

    def _add(self, text: str, parts: Parts) -> None:
        match self._kind:
            case _Kind.CALL:
                text = text if self._name is None else text.lstrip(SPACE)
                if text:
                    self._call(text, parts)
            case _Kind.REASONING:
                self._kept += text if self._is_shown else ""
                if self._is_streamed:
                    parts.reasoning, self._kept = parts.reasoning + self._kept, ""
            case _ if text:
                parts.content += text
                parts.phase = self._phase

    def _call(self, arguments: str, parts: Parts) -> None:
        parts.called(self._num_calls, self._name, arguments)
        self._name = None

    def _end(self, parts: Parts, *, is_cut: bool = False) -> None:
        """End a message."""
        if self._kind is _Kind.CALL:
            if self._name is not None and not is_cut:
                self._call("{}", parts)
            self._num_calls += self._name is None
            self._name = None
        parts.reasoning, self._kept = parts.reasoning + self._kept, ""
        self._kind = None


class FinalStart:
    """A FindsContent."""

    def __init__(self) -> None:
        self._held = ""  # it is not known yet what this is
        self._has_header = False
        self._has_begun = False

    def push(self, text: str) -> tuple[str, str]:
        """See FindsContent.push."""
        if self._has_begun:
            return "", text
        held = self._held + text
        self._has_header = self._has_header or held.lstrip("\n").startswith(_BEGINS)
        self._has_begun = not self._has_header and not _may_begin(held)
        begin = held.find(_FINAL)
        end = held.find(MESSAGE, begin) if begin >= 0 else -1
        at = len(held) - held_length(held, _FINAL) if begin < 0 else begin
        if end >= 0:
            self._has_begun, at = True, end + len(MESSAGE)
        elif not self._has_header:
            at = 0
        self._held = "" if self._has_begun else held[at:]
        return held[:at], held[at:] if self._has_begun else ""

    def finish(self) -> str:
        """See FindsContent.finish."""
        held, self._held = self._held, ""
        return held


def _may_begin(text: str) -> bool:
    """Whether a text that begins so may be a header, or what follows one."""
    bare = text.lstrip("\n")
    return any(bare.startswith(mark) or mark.startswith(bare) for mark in _BEGINS)
