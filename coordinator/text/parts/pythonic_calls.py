"""Parses a list of Python calls, `[get_weather(city="Paris"), now()]`: Llama 3.2 and 4.

A call is returned when it is complete. Its arguments must be keywords with literals; anything else
is not a call, and is returned as text.
"""

from __future__ import annotations

import ast
import json

from coordinator.text.parts.interface import CallPiece, Parts

_SPACE = " \t\r\n"
_TAG = "<|python_tag|>"
_OPENING = {"(": ")", "[": "]", "{": "}"}


class PythonicCalls:
    """A PartsParser for answers that are either a list of calls or plain text."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._rest = ""  # not parsed yet
        self._before = ""  # text before the list: content if it turns out not to be a list
        self._in_list = False
        self._is_text = False

    def push(self, text: str) -> Parts:
        """See PartsParser.push."""
        self._rest += text
        parts = Parts()
        if not (self._in_list or self._is_text):
            self._look_at_beginning()
        while self._in_list and self._one_call(parts):
            pass
        if self._is_text:
            parts.content += self._before + self._rest
            self._before = self._rest = ""
        return parts

    def finish(self) -> Parts:
        """See PartsParser.finish."""
        rest = self._rest.strip(_SPACE + "],") if self._num_calls else self._before + self._rest
        self._before = self._rest = ""
        return Parts(content=rest)

    def _look_at_beginning(self) -> None:
        bare = self._rest.lstrip(_SPACE).removeprefix(_TAG).lstrip(_SPACE)
        if bare.startswith("["):
            self._in_list = True
            self._before, self._rest = self._rest.removesuffix(bare), bare
        elif bare and not _TAG.startswith(bare):
            self._is_text = True

    def _one_call(self, parts: Parts) -> bool:
        """Take the next call; return False if more text is needed, or it is not a call."""
        start = len(self._rest) - len(self._rest.lstrip(_SPACE + ("," if self._num_calls else "[")))
        end = _end_of_call(self._rest, start)
        if end is None:
            return False
        piece = _as_call(self._rest[start:end], self._num_calls)
        if piece is None:
            self._in_list, self._is_text = False, True
            return False
        parts.calls.append(piece)
        self._num_calls += 1
        self._before = ""
        self._rest = self._rest[end:]
        return True


def _end_of_call(text: str, start: int) -> int | None:
    """Return the index after the bracket that closes the first one from `start`; None: not yet."""
    closing: list[str] = []
    quote, escaped = "", False
    for at in range(start, len(text)):
        char = text[at]
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "\"'":
            quote = char
        elif char in _OPENING:
            closing.append(_OPENING[char])
        elif closing and char == closing[-1]:
            closing.pop()
            if not closing:
                return at + 1
    return None


def _as_call(source: str, index: int) -> CallPiece | None:
    """Parse a call with keyword arguments that are literals; None if it is something else."""
    try:
        call = ast.parse(source, mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        arguments = {
            keyword.arg: ast.literal_eval(keyword.value)
            for keyword in call.keywords
            if keyword.arg is not None
        }
        if len(arguments) < len(call.keywords):
            return None  # **unpacking, or a repeated keyword
        return CallPiece(index, ast.unparse(call.func), json.dumps(arguments, allow_nan=False))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
