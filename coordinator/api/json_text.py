"""JSON texts of clients, read within limits.

A few megabytes of `[[],[],..` make gigabytes of objects, and take the event loop seconds in which
nobody else is served. So it is counted first, natively, what a text would be made into.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from pdserve import _native
from pdserve.errors import InvalidRequest

MAX_NESTING = 128  # nothing that works on a text later has to reckon with running out of stack
MAX_CONTAINERS = 2**17  # lists and objects
MAX_MEMBERS = 2**18  # of objects
MAX_ITEMS = 2**21  # of lists and objects: token ids, as a rule
_LONG_BYTES = 2**20  # counting in more takes milliseconds


class JsonReader:
    """Reads one text, or several that belong together and share the limits."""

    def __init__(self) -> None:
        self._containers = self._members = self._items = 0

    def read(self, text: bytes, what: str, param: str | None = None) -> Any:
        """Its value. Raises InvalidRequest, which calls the text `what`."""
        self._count(_native.json_shape(text), what, param)
        return _decoded(text, what, param)

    def read_object(self, text: str, param: str) -> dict[str, Any]:
        """The arguments of a call; none are an empty text. Raises InvalidRequest."""
        value = self.read(text.encode() or b"{}", param, param)
        if not isinstance(value, dict):
            raise InvalidRequest(f"{param} is no JSON object", param)
        return value

    async def read_long(self, text: bytes, what: str) -> Any:
        """Like `read`; the event loop does not wait while a long text is counted."""
        if len(text) <= _LONG_BYTES:
            return self.read(text, what)
        shape = await asyncio.to_thread(_native.json_shape, text)
        self._count(shape, what, None)
        return _decoded(text, what, None)

    def _count(self, shape: tuple[int, int, int, int], what: str, param: str | None) -> None:
        containers, members, items, depth = shape
        self._containers += containers
        self._members += members
        self._items += items
        if depth > MAX_NESTING:
            raise InvalidRequest(f"{what} is nested deeper than {MAX_NESTING} levels", param)
        for count, limit, kind in (
            (self._containers, MAX_CONTAINERS, "lists and objects"),
            (self._members, MAX_MEMBERS, "members of objects"),
            (self._items, MAX_ITEMS, "items"),
        ):
            if count > limit:
                raise InvalidRequest(f"{what} has more than {limit} {kind}", param)


def _decoded(text: bytes, what: str, param: str | None) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        reason = str(error).partition(" - at `")[0]  # of no type, the place says nothing
        raise InvalidRequest(f"{what} is not valid JSON: {reason}", param) from error
