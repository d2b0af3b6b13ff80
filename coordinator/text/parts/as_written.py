"""Follows a value that is no JSON, to find its end. It is passed on as the model wrote it.

Models write other languages' literals, too: strings in other quotes, comments. Brackets and marks
inside these mean nothing.
"""

from __future__ import annotations

from coordinator.text.parts.interface import SPACE

QUOTES = "\"'`"
CLOSING = {"{": "}", "[": "]"}
COMMENTS = {"//": "\n", "/*": "*/", "#": "\n"}
_AFTER_STRING = frozenset("\n,:}]/#" + QUOTES)


class AsWritten:
    """The rest of a value from where it is no JSON any more.

    Args:
        closing: of the brackets that are open.
        quote: of the string that has begun already.
    """

    def __init__(self, closing: list[str], quote: str = "") -> None:
        self.is_complete = False
        self._closing = closing
        self._quote = quote
        self._num_quotes = 0  # at the end of the text, of those that would end the string
        self._is_escaped = False
        self._may_be_over = False  # the string: its quote may also be an apostrophe
        self._comment = ""  # what ends it
        self._length = 0  # of the string
        self._is_behind_empty = False  # string, whose quote may be the second of three
        self._last = ""  # character

    @property
    def is_in_string(self) -> bool:
        """Whether the text ends inside a string."""
        return bool(self._quote)

    @property
    def is_in_comment(self) -> bool:
        """Whether the text ends inside a comment."""
        return bool(self._comment)

    def push(self, char: str) -> None:
        """Take one character."""
        is_third = self._is_behind_empty and char == self._last
        self._is_behind_empty = False
        if is_third:
            self._quote, self._may_be_over = 3 * char, False
        elif self._comment:
            self._in_comment(char)
        elif self._quote and not self._is_over(char):
            self._in_string(char)
        else:
            self._outside(char)
        self._last = char

    # ---- parts ---------------------------------------------------------------------------------

    def _in_comment(self, char: str) -> None:
        if (self._last + char).endswith(self._comment):
            self._comment = ""

    def _is_over(self, char: str) -> bool:
        """Return whether the string ended before this character."""
        if not self._may_be_over or (char in SPACE and char != "\n"):
            return False
        self._may_be_over = False
        if char in _AFTER_STRING:
            self._quote = ""
        return not self._quote

    def _in_string(self, char: str) -> None:
        length, self._length = self._length, self._length + 1
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped, self._num_quotes = True, 0
        elif char != self._quote[0]:
            self._num_quotes = 0
        else:
            self._num_quotes += 1
            if self._num_quotes < len(self._quote):
                return
            self._num_quotes = 0
            self._is_behind_empty = not length and len(self._quote) == 1
            self._may_be_over = self._quote == "'" and bool(self._closing)
            if not self._may_be_over:
                self._quote = ""
                self.is_complete = not self._closing

    def _outside(self, char: str) -> None:
        begun = char if char == "#" else self._last + char
        if begun in COMMENTS:
            self._comment = COMMENTS[begun]
        elif char in QUOTES and not (self._last.isalnum() or self._last == "_"):
            self._quote, self._length = char, 0
        elif char in CLOSING:
            self._closing.append(CLOSING[char])
        elif char in self._closing:
            while self._closing.pop() != char:
                pass
            self.is_complete = not self._closing
