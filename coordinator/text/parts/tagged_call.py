"""Incremental parser of one tool call as tags, with values as plain text: Qwen3-Coder.

    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>

Strings are passed on as they arrive; other values when they are whole, as the function's schema
says what they are. Where a value has the end of a function, or of its mark, and another function
follows, or the end of the text, the model forgot the value's own end: it ended there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from enum import Enum, auto
from typing import Any

from coordinator.text.parts.growing_text import GrowingText
from coordinator.text.parts.interface import SPACE, NotACall, Tools, held_length
from coordinator.text.parts.typed_values import argument_schema, as_json, is_text, json_of

FUNCTION, PARAMETER = "<function=", "<parameter="
FUNCTION_END, PARAMETER_END = "</function>", "</parameter>"
_CALL_END = "</tool_call>"
_MAX_HEAD = 256  # characters of a name in its tag
# Models forget the end of a value: where a line is the tag of another known parameter, it ended.
_NEXT = re.compile(r"\n<parameter=([^<>\n]{1,128})>")
_BEGINS = re.compile(r"<function=[^<>\n]{1,128}>")
_HELD = 160  # characters after a "<" that may become one of these


class _Place(Enum):
    """What comes next."""

    NAME = auto()
    TAG = auto()  # of a parameter, or the end
    KEY = auto()
    VALUE = auto()
    OVER = auto()


class TaggedCall:
    """A CallReader from the tag of the function on. See the module."""

    def __init__(self, tools: Tools) -> None:
        self.name: str | None = None
        self.call_id: str | None = None
        self.is_refused = False
        self.is_complete = False
        self.has_arguments = False
        self._tools = tools
        self._schema: Mapping[str, Any] = {}  # of the arguments
        self._place = _Place.NAME
        self._text = ""  # of the tag that is being read, or of a value: what may belong to its end
        self._value = GrowingText()  # of one that is no string
        self._behind: GrowingText | None = None  # from what may be the end of the function on
        self._keys: set[str] = set()
        self._key = ""
        self._is_repeated = False  # the key: the first value counts
        self._is_string = False  # the value, whatever it looks like
        self._is_begun = False  # a string was passed on in part
        self._arguments = ""  # not taken yet

    @property
    def unread(self) -> str:
        """Its last characters, which are not certain to belong to it."""
        if self._place in (_Place.NAME, _Place.KEY):
            return ""
        return str(self._behind or "") + self._text

    def push(self, char: str) -> bool:
        """Take one character; False: the call ended before it."""
        if self._place is _Place.OVER:
            return False
        if self._place is _Place.TAG and not self._text and char in SPACE:
            return True
        if self._place is _Place.TAG and not _begins_tag(self._text + char):
            return self._end(is_consumed=False)
        self._text += char
        match self._place:
            case _Place.NAME:
                self._read_name(char)
            case _Place.TAG:
                self._read_tag()
            case _Place.KEY:
                self._read_key(char)
            case _Place.VALUE:
                self._read_value(char)
        return True

    def take(self) -> str:
        """Return further JSON text of the arguments, once `name` is known."""
        taken, self._arguments = self._arguments, ""
        return taken

    def finish(self, *, is_cut: bool) -> str:
        """End the text; return what was held back of the arguments."""
        if self._place is _Place.VALUE and self._behind is not None and not is_cut:
            self._end_early()
        elif self._place is _Place.VALUE:
            self._go_on()
            part = held_length(self._text, PARAMETER_END)
            self._keep(len(self._text) - (part if part > 1 else 0))
            self._arguments += "" if self._is_repeated else str(self._value).strip()
        return self.take()

    # ---- parts ---------------------------------------------------------------------------------

    def _read_name(self, char: str) -> None:
        if len(self._text) > len(FUNCTION) + _MAX_HEAD:
            raise NotACall
        if char != ">":
            return
        name = self._text.removeprefix(FUNCTION)[:-1].strip()
        if name in self._tools:
            self.name, self._schema = name, self._tools[name]
            self._arguments = "{"
        else:
            self.is_refused = True
        self._next(_Place.TAG)

    def _read_tag(self) -> None:
        if self._text == FUNCTION_END:
            self._text = ""
            self._end(is_consumed=True)
        elif self._text == PARAMETER:
            self._next(_Place.KEY)

    def _read_key(self, char: str) -> None:
        if char != ">":
            return
        self._key = self._text[:-1].strip()
        self._is_repeated = self._key in self._keys
        self._is_string = False
        if not self._is_repeated and self.name is not None:
            schema = argument_schema(self._schema, self._key)
            self._is_string = is_text(schema, self._schema)
            self._arguments += (", " if self._keys else "") + json.dumps(self._key) + ": "
            self._keys.add(self._key)
        self._next(_Place.VALUE)

    def _read_value(self, char: str) -> None:
        text = self._text
        if char == ">":
            if text.endswith(PARAMETER_END):
                self._go_on()
                self._end_value(_before_line_break(self._text, -len(PARAMETER_END)))
                return
            found = _NEXT.fullmatch(text, max(0, text.rfind("\n")))
            if found and found[1] != self._key and argument_schema(self._schema, found[1]):
                self._go_on()
                self._end_value(len(self._text) - len(found[0]))
                self._text = f"{found[1]}>"
                self._read_key(char)
                return
            self._look_for_end()
        if self._place is _Place.VALUE:
            self._keep(_certain(self._text))

    def _look_for_end(self) -> None:
        """Hold back the text from the end of the function on, until it is known whether it is."""
        text = self._text
        if self._behind is not None:
            if _BEGINS.fullmatch(text, max(0, text.rfind("<"))):
                self._end_early()
            return
        for mark in (FUNCTION_END, _CALL_END):
            if text.endswith(mark):
                self._keep(_before_line_break(text, -len(mark)))
                self._behind = GrowingText()

    def _go_on(self) -> None:
        """Take what was held back as a part of the value."""
        if self._behind is not None:
            self._text, self._behind = str(self._behind) + self._text, None

    def _end_early(self) -> None:
        """End the function where what was held back begins."""
        behind = (str(self._behind or "") + self._text).removeprefix("\n")
        self._text, self._behind = "", None
        self._end_value(0)
        self._end(is_consumed=True)
        self._text = behind.removeprefix(FUNCTION_END)

    def _keep(self, until: int) -> None:
        """Take the text up to there as certain: as a part of the value, or of what is behind."""
        told, self._text = self._text[:until], self._text[until:]
        if self._behind is not None:
            self._behind.add(told)
        elif self._is_string and told:
            if not self._is_begun:  # the line break at its beginning is layout
                told, self._is_begun = told.removeprefix("\n"), True
                self._arguments += '"'
            self._arguments += json_of(told)[1:-1]
        elif not self._is_string:
            self._value.add(told)

    def _end_value(self, length: int) -> None:
        self._keep(length)
        if self._is_string:
            self._arguments += '"' if self._is_begun else '""'
        elif not self._is_repeated and self.name is not None:
            value = str(self._value).removeprefix("\n")
            schema = argument_schema(self._schema, self._key)
            self._arguments += as_json(value, schema, self._schema)
        self._next(_Place.TAG)

    def _next(self, place: _Place) -> None:
        self._place, self._text, self._is_begun = place, "", False
        self._value, self._behind = GrowingText(), None

    def _end(self, *, is_consumed: bool) -> bool:
        if self.name is not None:
            self._arguments += "}"
        self._place, self.is_complete, self.has_arguments = _Place.OVER, True, True
        return is_consumed


def _begins_tag(text: str) -> bool:
    return PARAMETER.startswith(text) or FUNCTION_END.startswith(text)


def _before_line_break(text: str, end: int) -> int:
    """Return where a text ends before this place, and before one line break there."""
    end += len(text)
    return end - text.endswith("\n", 0, end)


def _certain(text: str) -> int:
    """Return how many characters of a value cannot be the beginning of its end."""
    at = text.find("<", max(0, len(text) - _HELD))
    at = len(text) if at < 0 else at
    return at - text.endswith("\n", 0, at)
