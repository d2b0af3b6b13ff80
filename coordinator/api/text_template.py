"""An event that is sent again and again with another text in it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

_MARK = "\0text\0"


class TextTemplate:
    """Encoded once with a mark for the text; from then on the text alone is."""

    def __init__(self, encode: Callable[[str], bytes]) -> None:
        """`encode` makes the whole event for a text, which is in it once."""
        self._before, self._behind = encode(_MARK).split(msgspec.json.encode(_MARK))

    def filled(self, text: str) -> bytes:
        """The event."""
        return self._before + msgspec.json.encode(text) + self._behind
