"""Incremental parser of one tool call as a JSON object, `{"name": ..., "arguments": {...}}`.

The arguments' value is passed on as it arrives, so that long arguments are streamed. Keys may be in
any order; arguments that come before the name are held until the name is known.
"""

from __future__ import annotations

import json

ARGUMENT_KEYS = frozenset({"arguments", "parameters"})  # the second is Llama 3's
_SPACE = " \t\r\n"


class NotACall(Exception):  # control flow inside this package only
    """The object read so far is no tool call."""


class JsonCall:
    """Parses one object. `name` and `take` return what is known so far.

    Args:
        name: the function's name if it precedes the object, which then holds only the arguments.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.is_complete = False
        self._is_arguments_alone = name is not None
        self._depth = int(self._is_arguments_alone)
        self._in_string = False
        self._escaped = False
        # State of the value that is being read.
        self._key: str | None = "arguments" if self._is_arguments_alone else None
        self._value = ""  # what is read at depth 1: a key, or a value
        self._arguments = ""  # not taken yet
        self._first = ""  # character of the arguments

    def push(self, char: str) -> None:
        """Take one character. Raises NotACall."""
        if self._in_string:
            self._in_value(char)
            self._end_string(char)
        elif char == '"':
            self._in_string = True
            self._in_value(char)
        elif char in "{[":
            self._open(char)
        elif char in "}]":
            self._close(char)
        elif self._depth == 1 and char == ":" and self._key is None:
            self._key, self._value = self._as_text(self._value), ""
        elif self._depth == 1 and char == ",":
            self._end_value()
        else:
            self._in_value(char)

    def take(self) -> str:
        """Return further JSON text of the arguments, once the name is known."""
        if self.name is None or not (self._first == "{" or self.is_complete):
            return ""
        taken, self._arguments = self._arguments, ""
        return taken

    # ---- parts ---------------------------------------------------------------------------------

    def _end_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False

    def _open(self, char: str) -> None:
        if self._depth == 0 and char != "{":
            raise NotACall
        if self._depth > 0:
            if self._key is None:
                raise NotACall
            self._in_value(char)
        self._depth += 1

    def _close(self, char: str) -> None:
        if self._depth > 1:
            self._in_value(char)
            self._depth -= 1
            self.is_complete = self._is_arguments_alone and self._depth == 1
            return
        if char != "}":
            raise NotACall
        self._depth = 0
        self._end_value()
        if self.name is None:
            raise NotACall
        if self._first != "{":
            self._arguments = self._arguments or "{}"
        self.is_complete = True

    def _in_value(self, char: str) -> None:
        if self._depth == 0:
            raise NotACall
        if self._depth == 1 and not self._in_string and char in _SPACE:
            return  # around keys and values
        if self._key in ARGUMENT_KEYS:
            self._first = self._first or char
            self._arguments += char
        else:
            self._value += char

    def _end_value(self) -> None:
        if self._key == "name":
            self.name = self._as_text(self._value)
        elif self._key in ARGUMENT_KEYS and self._first == '"':  # a string that holds JSON
            self._arguments = self._as_text(self._arguments)
        elif self._key in ARGUMENT_KEYS and self._first != "{":  # null, as a rule
            self._arguments = ""
        self._key, self._value = None, ""

    @staticmethod
    def _as_text(value: str) -> str:
        try:
            text = json.loads(value)
        except json.JSONDecodeError as error:
            raise NotACall from error
        if not isinstance(text, str):
            raise NotACall
        return text
