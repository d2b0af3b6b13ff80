"""Follows one JSON value as a model writes it, and mends what no JSON parser would take.

Models write line breaks into strings, escape what needs none, leave a bracket or a comma too many,
and write Python's `True`. What comes out is the same value, as JSON. From where a value is no JSON
at all, it is passed on as it is (`as_written.py`): whoever called sees what the model wrote.
"""

from __future__ import annotations

import json

from coordinator.text.parts.as_written import CLOSING, QUOTES, AsWritten
from coordinator.text.parts.interface import SPACE

_NEVER = "<;"  # never in JSON outside of strings: a mark or a separator follows
_FOREIGN = QUOTES.replace('"', "") + "/#"  # outside of strings: quotes of others, comments
_ESCAPED = '"\\/bfnrt'  # what a backslash may precede
_HEX = "0123456789abcdefABCDEF"
_WORDS = {"True": "true", "False": "false", "None": "null"}


class JsonText:
    """One value: an object, a list, a string, or a bare word such as a number."""

    def __init__(self) -> None:
        self.kind = ""  # the value's first character
        self.is_complete = False  # a bare word never is: what ends it is not a part of it
        self._closing: list[str] = []  # of the open brackets
        self._in_string = False
        self._string_length = 0
        self._escape = ""  # begun in a string
        self._held = ""  # a comma, and whitespace after it: dropped before a bracket that closes
        self._word = ""
        self._is_after_colon = False
        self._foreign: AsWritten | None = None  # from where it is no JSON
        self._last = ""  # character

    @property
    def is_in_string(self) -> bool:
        """Whether the text ends inside a string."""
        return self._in_string or (self._foreign is not None and self._foreign.is_in_string)

    @property
    def is_in_comment(self) -> bool:
        """Whether the text ends inside a comment."""
        return self._foreign is not None and self._foreign.is_in_comment

    def push(self, char: str) -> str | None:
        """Take one character; return the text for it. None: it is no part of the value."""
        if self.is_complete:
            return None
        self.kind = self.kind or char
        if self._in_string:
            return self._in_string_text(char)
        if self._foreign is None and self._is_foreign(char):
            return self._begin_foreign(char)
        if self._foreign is not None:
            return self._in_foreign(self._foreign, char)
        if char not in SPACE and char not in _NEVER:
            self._is_after_colon = char == ":"
        self._last = char
        if char.isalnum() or char in "+-._":
            self._word += char
            return ""
        ended = self._ended_word()
        if char in _NEVER or not (self._closing or char in '{["'):
            self._word = ended  # `close` returns it
            return None
        return ended + self._outside(char)

    def close(self) -> str:
        """Return what the value still lacks when its text ends here."""
        self.is_complete = True
        if self._foreign is not None:
            return ""
        text = self._ended_word()
        if self._in_string:
            text += _mended(self._escape) + '"'
        elif self._is_after_colon and not text:
            text = "null"
        self._in_string, self._escape, self._held = False, "", ""
        return text + "".join(reversed(self._closing))

    def cut(self) -> str:
        """Return what was held back when the text ends for good, without making it whole."""
        return self._held + self._word

    # ---- parts ---------------------------------------------------------------------------------

    def _is_foreign(self, char: str) -> bool:
        """Whether it is no JSON from this character on, outside of a string."""
        is_other = char in _FOREIGN and not (char == "'" and self._word)  # an apostrophe
        return is_other or self._is_third_quote(char)

    def _is_third_quote(self, char: str) -> bool:
        return char == self._last == '"' and not self._string_length

    def _begin_foreign(self, char: str) -> str:
        text, self._held, self._word = self._held + self._word, "", ""
        is_triple = self._is_third_quote(char)
        self._foreign = AsWritten(self._closing, 3 * char if is_triple else "")
        if not is_triple:
            self._foreign.push(char)
        return text + char

    def _in_foreign(self, foreign: AsWritten, char: str) -> str | None:
        if char in _NEVER and not (foreign.is_in_string or foreign.is_in_comment):
            return None
        foreign.push(char)
        self.is_complete = foreign.is_complete
        return char

    def _ended_word(self) -> str:
        word, self._word = self._word, ""
        if not word:
            return ""
        held, self._held = self._held, ""
        return held + _WORDS.get(word, word)

    def _outside(self, char: str) -> str:
        if char in SPACE:
            if self._held:
                self._held += char
                return ""
            return char
        if char in "}]":
            return self._closed(char)
        held, self._held = self._held, ""
        if char == ",":
            self._held = char
            return held
        if char in CLOSING:
            self._closing.append(CLOSING[char])
        elif char == '"':
            self._in_string, self._string_length = True, 0
        return held + char

    def _closed(self, char: str) -> str:
        """Close the innermost such bracket, and those that are open inside it."""
        held, self._held = self._held, ""
        text = held.removeprefix(",")
        if char not in self._closing:
            return text  # one too many
        while self._closing:
            last = self._closing.pop()
            text += last
            if last == char:
                break
        self.is_complete = not self._closing
        return text

    def _in_string_text(self, char: str) -> str:
        if self._escape:
            self._escape += char
            return self._ended_escape()
        if char == '"':
            self._in_string, self._last = False, char
            self.is_complete = not self._closing
            return char
        self._string_length += 1
        if char == "\\":
            self._escape = char
            return ""
        return char if char >= " " else json.dumps(char)[1:-1]

    def _ended_escape(self) -> str:
        """Return the escape, mended if it is none; "" while it is not whole."""
        escape = self._escape
        if escape[1] == "u" and all(char in _HEX for char in escape[2:]):
            if len(escape) < 6:
                return ""
            self._escape = ""
            return escape
        self._escape = ""
        if escape[1] != "u":
            return _mended(escape)
        return _mended(escape[:-1]) + self._in_string_text(escape[-1])


def _mended(escape: str) -> str:
    """Return a text that begins with a backslash as JSON for what was meant."""
    if len(escape) == 2 and escape[1] in _ESCAPED:
        return escape
    if escape == "\\'":
        return "'"
    return json.dumps(escape, ensure_ascii=False)[1:-1]
