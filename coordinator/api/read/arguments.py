"""Arguments of earlier tool calls as mappings, which chat templates want.

What a limit cut off, what is no object at all, or one too large to be read, is still what the model
said: an answer that was given out is taken back.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from coordinator.api.read.json_text import JsonReader, NotJson
from pdserve.shared.errors import InvalidRequest

WHOLE = "arguments"  # the name under which a text is shown that is no object
_CLOSING = {"{": "}", "[": "]"}
# Brackets, and strings: also one that does not end, else each quote in it would be tried.
_TOKEN = re.compile(r"""[{}\[\],]|"(?:[^"\\]|\\.)*+(?P<is_ended>")?""", re.DOTALL)
_PART_OF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u[0-9a-fA-F]{0,3})?$")


def read_arguments(text: str, reader: JsonReader) -> dict[str, Any]:
    """Return arguments as a mapping: as far as they go if they were cut off."""
    if not text.strip():
        return {}
    for candidate in _candidates(text):
        try:
            value = reader.read(candidate.encode(), "it")
        except NotJson:
            continue
        except InvalidRequest:  # more than is read
            break
        if isinstance(value, dict):
            return value
        break
    return {WHOLE: text}


def _candidates(text: str) -> Iterator[str]:
    """Iterate over the text and what is left of it if its end was cut off, the longest first."""
    yield text
    closing: list[str] = []
    until = 0  # where the last member begins
    closed: list[str] = []  # since then
    end = 0  # of the last token
    for token in _TOKEN.finditer(text):
        mark = token[0]
        if mark[0] == '"' and not token["is_ended"]:
            break
        end = token.end()
        if mark in _CLOSING:
            closing.append(_CLOSING[mark])
        elif closing and mark == closing[-1]:
            closed.append(closing.pop())
        if mark in ("{", "[", ","):
            until, closed = end - (mark == ","), []
    if not closing:
        return
    left = "".join(reversed(closing))
    rest = text[end:]
    if '"' in rest:  # a string that does not end
        yield f'{text[:end]}{_PART_OF_ESCAPE.sub("", rest)}"{left}'
    else:
        yield text + left
    yield text[:until] + "".join(closed) + left
