"""Drafts from a stream's own text: what followed where it read before as its end does."""

from __future__ import annotations

from pdserve._native import TextIndex
from pdserve.engine.request import Request


class OwnText:
    """Implements `Source`. An index is asked at each step, so it is no object of Python's."""

    name = "text"

    def drafter(self, request: Request) -> TextIndex:
        """As Source.drafter."""
        return TextIndex()
