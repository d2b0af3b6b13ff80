"""A text that grows by characters, and is read now and then."""

from __future__ import annotations


class GrowingText:
    """Neither adding nor reading takes longer the more there is, but for a copy."""

    def __init__(self) -> None:
        self._text = ""
        self._new: list[str] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        if self._new:
            self._text += "".join(self._new)
            self._new = []
        return self._text

    def add(self, text: str) -> None:
        """Add further text."""
        self._new.append(text)
        self._length += len(text)
