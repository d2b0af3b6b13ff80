"""Parses a list of Python calls, `[get_weather(city="Paris"), now()]`: Llama 3.2 and 4.

A call is returned when it is complete. Its arguments must be keywords with literals, of Python or
of JSON; anything else is not a call, and is returned as text. A literal that neither of them reads,
such as `01`, is passed on as it is.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from itertools import pairwise

from coordinator.text.parts.as_written import COMMENTS
from coordinator.text.parts.interface import SPACE, Parts, Tools
from coordinator.text.parts.python_values import python_value, without_strings
from coordinator.text.parts.text_around import TextAround
from coordinator.text.parts.typed_values import json_of

BEGINS, END = ("<|python_tag|>", "<|python_start|>"), "<|python_end|>"
_LIKE_A_LITERAL = re.compile(r"""\s*(?:[-+]?(?:[\d.]|NaN\b|nan\b|Inf|inf)|["'`\[{]|undefined\b)""")
_CALL = re.compile(r"\w\s*\(")
_OPENING = {"(": ")", "[": "]", "{": "}"}
_NAME, _KEY = re.compile(r"[\w.-]{1,128}\s{0,128}"), re.compile(r"\s*[\w.-]+\s*")


class _Place(Enum):
    """Where the text so far ends."""

    BEGINNING = auto()
    LIST = auto()  # between calls
    CALL = auto()
    BEHIND = auto()  # after the list
    TEXT = auto()


class PythonicCalls:
    """A PartsParser for answers that are either a list of calls or plain text."""

    def __init__(self, tools: Tools) -> None:
        self._tools = tools
        self._num_calls = 0
        self._place = _Place.BEGINNING
        self._raw = ""  # since the last call: content if no call follows
        self._source = _Source()
        self._around = TextAround()

    @property
    def is_in_call(self) -> bool:
        """Whether the text ends inside the arguments of a call."""
        return self._place is _Place.CALL

    def push(self, text: str) -> Parts:
        """Take the next piece of text; return the parts that are certain now."""
        parts = Parts()
        for at, char in enumerate(text):
            if self._place is _Place.TEXT:
                parts.content += self._around.shown(text[at:])
                break
            self._step(char, parts)
        return parts

    def finish(self, *, is_cut: bool = False) -> Parts:
        """End the text; return what was held back as its most likely kind of part."""
        raw = self._raw
        if self._num_calls and self._place in (_Place.LIST, _Place.BEHIND):
            raw = raw.strip(SPACE + ",")  # a list that was not ended
        elif self._place is _Place.CALL:
            raw += self._source.text
        self._raw = ""
        return Parts(self._around.shown(raw) + self._around.finish())

    # ---- parts ---------------------------------------------------------------------------------

    def _step(self, char: str, parts: Parts) -> None:
        if self._place is _Place.CALL:
            self._in_call(char, parts)
            return
        self._raw += char
        match self._place:
            case _Place.BEGINNING:
                bare = _without_mark(self._raw)
                if bare.startswith("["):
                    self._place = _Place.LIST
                elif bare and not any(mark.startswith(bare) for mark in BEGINS):
                    self._give_up(parts)
            case _Place.LIST:
                self._in_list(char, parts)
            case _:
                bare = self._raw.lstrip(SPACE)
                if bare == END:
                    self._raw = ""
                elif not END.startswith(bare):
                    self._give_up(parts)

    def _in_list(self, char: str, parts: Parts) -> None:
        if char in SPACE or (char == "," and self._num_calls):
            return
        if char == "]" and self._num_calls:
            self._place, self._raw = _Place.BEHIND, ""
            return
        self._raw = self._raw[:-1]
        self._place, self._source = _Place.CALL, _Source()
        self._in_call(char, parts)

    def _in_call(self, char: str, parts: Parts) -> None:
        source = self._source
        source.push(char)
        if source.is_complete:
            found = source.arguments()
            if found is not None:
                parts.called(self._num_calls, source.name, found)
                self._around.call_begins()
                self._num_calls += 1
                self._place, self._raw = _Place.LIST, ""
                return
        elif source.name in self._tools if source.name else _NAME.fullmatch(source.text):
            return
        self._raw += source.text
        self._give_up(parts)

    def _give_up(self, parts: Parts) -> None:
        raw, self._raw, self._place = self._raw, "", _Place.TEXT
        parts.content += self._around.shown(raw)


class _Source:
    """The source of one call while it comes in, with where its arguments are."""

    def __init__(self) -> None:
        self.name = ""  # once its bracket is open
        self.is_complete = False
        self._chars: list[str] = []
        self._closing: list[str] = []
        self._quote = ""
        self._opened_at = 0  # the quote: number of characters up to it
        self._is_escaped = False
        self._comment = ""  # what ends it
        self._begun_at = 0  # the comment
        self._comments: list[tuple[int, int]] = []  # Python's: there is nothing
        self._cuts: list[int] = []  # positions of the call's brackets, and of commas between them

    @property
    def text(self) -> str:
        """What came so far."""
        return "".join(self._chars)

    def push(self, char: str) -> None:
        """Take one character."""
        self._chars.append(char)
        if self._comment:
            self._in_comment(char)
        elif self._quote:
            self._in_string(char)
        elif self._begins_comment():
            self._begun_at = len(self._chars) - 1
        elif char in "\"'":
            is_third = (
                self._chars[-3:-1] == [char, char] and self._opened_at == len(self._chars) - 2
            )
            self._quote = 3 * char if is_third else char
            self._opened_at = len(self._chars)
        elif char in _OPENING:
            self._open(char)
        elif self._closing and char == self._closing[-1]:
            self._closing.pop()
            self.is_complete = not self._closing
        if not (self._quote or self._comment) and (
            self.is_complete or (len(self._closing) == 1 and char == ",")
        ):
            self._cuts.append(len(self._chars) - 1)

    def arguments(self) -> str | None:
        """Return the arguments as JSON; None: they are not all keywords with literals."""
        found: dict[str, str] = {}
        chars = list(self._chars)
        for begin, end in self._comments:
            chars[begin:end] = " " * (end - begin)
        for begin, end in pairwise(self._cuts):
            key, is_given, value = "".join(chars[begin + 1 : end]).partition("=")
            if not (key + value).strip() and end == self._cuts[-1]:
                break  # nothing after the last comma
            if not is_given or not _KEY.fullmatch(key) or key.strip() in found:
                return None
            if (told := _told(value)) is None:
                return None
            found[key.strip()] = told
        return "{" + ", ".join(f"{json_of(key)}: {value}" for key, value in found.items()) + "}"

    def _open(self, char: str) -> None:
        if not self._cuts and char == "(":
            self.name = self.text[:-1].strip()
            self._cuts.append(len(self._chars) - 1)
        self._closing.append(_OPENING[char])

    def _begins_comment(self) -> bool:
        last = "".join(self._chars[-2:])
        begun = last[-1] if last[-1] == "#" else last
        self._comment = COMMENTS.get(begun, "") if self._closing else ""
        return bool(self._comment)

    def _in_comment(self, char: str) -> None:
        if "".join(self._chars[-len(self._comment) :]) != self._comment:
            return
        if self._chars[self._begun_at] == "#":
            self._comments.append((self._begun_at, len(self._chars)))
        self._comment = ""

    def _in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        else:
            end = self._chars[max(self._opened_at, len(self._chars) - len(self._quote)) :]
            if "".join(end) == self._quote:
                self._quote = ""


def _told(value: str) -> str | None:
    """Return the value of an argument as JSON, or as it is; None: it is no literal at all."""
    try:
        return json_of(python_value(value))
    except ValueError:
        is_like_one = _LIKE_A_LITERAL.match(value) and not _CALL.search(without_strings(value))
        return value.strip() if is_like_one else None


def _without_mark(text: str) -> str:
    """Return a text without whitespace and a mark at its beginning."""
    bare = text.lstrip(SPACE)
    for mark in BEGINS:
        bare = bare.removeprefix(mark)
    return bare.lstrip(SPACE)
