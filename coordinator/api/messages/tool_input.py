"""The input of a call as JSON that clients can read while it arrives.

Models also write what is no JSON, such as names without quotes. Of chats, that is shown as it is.
But clients of this API parse what they have with each event, and give the whole message up where
that is no beginning of an object. So what is no JSON is held back, and at the end the whole text
becomes a member of its own: `{"city": Bern}` is `{"arguments": "{\\"city\\": Bern}"}`.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

import msgspec

from coordinator.api.read.arguments import WHOLE

_SPACE: Final = re.compile(r"[ \t\r\n]*")
# Of a string, as far as it is certain: an escape may not have ended, nor a pair of them.
_IN_STRING: Final = re.compile(
    r'(?:[^"\\\x00-\x1f]|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*"
)
_PART_OF_ESCAPE: Final = re.compile(
    r"\\(?:u(?:[0-9a-fA-F]{0,3}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u(?:[dD]?|[dD][c-fC-F]"
    r"[0-9a-fA-F]?))?)?)?)?"
)
_WORD: Final = re.compile(r"[^ \t\r\n,\]}\[{:\"]+")
_GOOD_WORD: Final = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
_MOST_WORD: Final = 1024  # characters of a number: it is looked at again with each token
_CLOSING: Final = {"{": "}", "[": "]"}


class _Next(Enum):
    """What comes next, outside of strings."""

    OBJECT = auto()  # at the beginning
    KEY_OR_END = auto()
    KEY = auto()
    COLON = auto()
    VALUE_OR_END = auto()
    VALUE = auto()
    COMMA_OR_END = auto()
    NOTHING = auto()


_CLOSED_BY: Final = {  # what ends a member that was begun
    _Next.COLON: ": null",
    _Next.VALUE: "null",
}


class ToolInput:
    """The text of one call's arguments."""

    def __init__(self) -> None:
        self._written: list[str] = []
        self._rest = ""  # not certain yet
        self._is_broken = False
        self._next = _Next.OBJECT
        self._in_string = False
        self._is_key = False  # the string
        self._closing: list[str] = []  # of the open brackets

    def push(self, text: str) -> str:
        """Take more text; return what may be told: with all before, the beginning of an object."""
        self._written.append(text)
        if self._is_broken:
            return ""
        self._rest += text
        at = 0
        while not self._is_broken and (end := self._step(at)) > at:
            at = end
        told, self._rest = self._rest[:at], self._rest[at:]
        return told

    def finish(self, *, is_cut: bool) -> str:
        """Return what is to be told besides, so that all is an object. What was cut off stays so.

        `is_cut`: the answer ends within the call.
        """
        if not self._is_broken and (is_cut or not self._closing):
            return ""
        whole = f'"{WHOLE}": {msgspec.json.encode("".join(self._written)).decode()}'
        if not self._closing:
            return "{" + whole + "}"
        told = '"' if self._in_string else ""
        if self._in_string:
            self._next = _Next.COLON if self._is_key else _Next.COMMA_OR_END
        while self._closing:
            told += _CLOSED_BY.get(self._next, "")
            is_outermost = len(self._closing) == 1
            if is_outermost and self._is_broken:
                told += ", " * (self._next not in (_Next.KEY, _Next.KEY_OR_END)) + whole
            elif self._next is _Next.KEY:
                told += '"": null'
            told += self._closing.pop()
            self._next = _Next.COMMA_OR_END
        return told

    # ---- parts ---------------------------------------------------------------------------------

    def _step(self, at: int) -> int:
        """Return where the next piece ends that is certain; `at`: none is."""
        if self._in_string:
            return self._string(at)
        begin = _match_end(_SPACE, self._rest, at)
        if begin == len(self._rest) or self._next is _Next.NOTHING:
            return begin
        char, following = self._rest[begin], self._next
        if char == '"' and following not in (_Next.OBJECT, _Next.COLON, _Next.COMMA_OR_END):
            self._in_string = True
            self._is_key = following in (_Next.KEY, _Next.KEY_OR_END)
        elif char in _CLOSING and following in (_Next.VALUE, _Next.VALUE_OR_END, _Next.OBJECT):
            self._is_broken = following is _Next.OBJECT and char == "["
            if self._is_broken:
                return at
            self._closing.append(_CLOSING[char])
            self._next = _Next.KEY_OR_END if char == "{" else _Next.VALUE_OR_END
        elif char == ":" and following is _Next.COLON:
            self._next = _Next.VALUE
        elif char == "," and following is _Next.COMMA_OR_END:
            self._next = _Next.KEY if self._closing[-1] == "}" else _Next.VALUE
        elif self._closing and char == self._closing[-1] and following not in _OPEN:
            self._closing.pop()
            self._next = _Next.COMMA_OR_END if self._closing else _Next.NOTHING
        elif following in (_Next.VALUE, _Next.VALUE_OR_END):
            return self._word(at, begin)
        else:
            self._is_broken = True
            return at
        return begin + 1

    def _string(self, at: int) -> int:
        end = _match_end(_IN_STRING, self._rest, at)
        if end > at or end == len(self._rest):
            return end
        if self._rest[end] == '"':
            self._in_string = False
            self._next = _Next.COLON if self._is_key else _Next.COMMA_OR_END
            return end + 1
        self._is_broken = _PART_OF_ESCAPE.fullmatch(self._rest, end) is None
        return at

    def _word(self, at: int, begin: int) -> int:
        """A number or a name; only what follows it says that it has ended."""
        end = _match_end(_WORD, self._rest, begin)
        if end == len(self._rest):
            self._is_broken = end - begin > _MOST_WORD
            return at
        self._is_broken = _GOOD_WORD.fullmatch(self._rest, begin, end) is None
        if self._is_broken:
            return at
        self._next = _Next.COMMA_OR_END
        return end


_OPEN: Final = (_Next.KEY, _Next.COLON, _Next.VALUE)  # after these, no bracket closes


def _match_end(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    return at if match is None else match.end()
