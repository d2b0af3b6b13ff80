"""A string whose end the model forgot: it ended before the mark that ends its call.

A mark may as well be a part of the string. Then the string goes on, and what follows its end goes
on with the value. That is known only later; until then the text from the mark on is held back.
"""

from __future__ import annotations

from coordinator.text.parts.as_written import QUOTES
from coordinator.text.parts.growing_text import GrowingText
from coordinator.text.parts.interface import SPACE, held_length
from coordinator.text.parts.json_text import JsonText

_GOES_ON = ",:}]"  # what follows a string


class MissingEnd:
    """Watches a value for a mark in its strings. Without a mark, it sees nothing."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._text = GrowingText()  # from the mark on, or what may become one
        self.is_possible = False  # the mark is whole

    def __len__(self) -> int:
        return len(self._text)

    @property
    def text(self) -> str:
        """The text from the mark on."""
        return str(self._text)

    def push(self, char: str, value: JsonText, *, was_in_string: bool) -> bool:
        """Take a character that the value has taken; True: the value ended before the mark."""
        is_inside = was_in_string or value.is_in_comment
        if self.is_possible:
            self._text.add(char)
            if value.is_in_string or char in SPACE or (was_in_string and char in QUOTES):
                return False
            if char in _GOES_ON:
                self.clear()
            return self.is_possible
        if is_inside and (self._text or char == self._mark[:1]):
            self._look(self.text + char)
            return self.is_possible and value.is_in_comment
        if self._text:
            self.clear()
        return False

    def clear(self) -> None:
        """Know that the text belongs to the value."""
        self._text, self.is_possible = GrowingText(), False

    def _look(self, text: str) -> None:
        self.is_possible = text.endswith(self._mark)
        length = len(self._mark) if self.is_possible else held_length(text, self._mark)
        self._text = GrowingText()
        self._text.add(text[len(text) - length :])
