"""An event that is sent many times with only its text changed."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

_MARK = "\0text\0"


class TextTemplate:
    """An event encoded once with a placeholder; afterwards only the text is encoded."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        """`encode` returns the whole event for a text, which must occur in it exactly once."""
        self._before, self._behind = encode(_MARK).split(msgspec.json.encode(_MARK))

    def filled(self, text: str) -> bytes:
        """Return the event with `text` filled in."""
        return self._before + msgspec.json.encode(text) + self._behind
