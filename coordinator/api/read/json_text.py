"""Reads clients' JSON within limits of size and nesting.

A few megabytes of `[[],[],..` decode to gigabytes of objects, and block the event loop for seconds.
So a native function first counts the objects that a text would decode to. All that are allowed take
a turn of the event loop of a few ten milliseconds, and what is done with them takes another one.

Numbers that a double does not hold, are refused where a schema has them. Decoders round the numbers
of a text without a word. In a schema that would be another constant or bound than the client's, so
it is refused by name. Whole numbers stay what they are.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, TypeVar

import msgspec

from coordinator.api.read.body_budget import Body
from pdserve import _native
from pdserve.shared.errors import InvalidRequest

MAX_NESTING = 128  # keeps recursive code that handles the value from exhausting the stack
MAX_CONTAINERS = 2**16  # lists and objects
MAX_MEMBERS = 2**16  # of objects
MAX_ITEMS = 5 * 2**16  # of lists and objects; usually token ids, of which OpenAI takes 300,000
T = TypeVar("T")
Shape = tuple[int, int, int, int]  # containers, members, items, depth
MAX_IN_PARTS = 2**18  # lists and objects of a text that is read part by part
_CONTAINER_BYTES, _MEMBER_BYTES, _ITEM_BYTES = 128, 128, 48  # of CPython objects
_WIDEST = (  # what begins a character beyond U+FFFF, as UTF-8 and escaped
    *(bytes([lead]) for lead in range(0xF0, 0xF5)),
    *(f"\\u{d}{half}".encode() for d in "dD" for half in "89abAB"),
)
_HALF_PAIR = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F]..)")
_LONG_BYTES = 2**20  # counting in longer texts takes milliseconds


class NotJson(InvalidRequest):
    """A text is no JSON."""


class JsonReader:
    """Reads one text, or several texts of one request that share the limits."""

    def __init__(self) -> None:
        self._containers = self._members = self._items = 0

    def read(self, text: bytes, what: str, param: str | None = None) -> Any:
        """Return the decoded value. Raises InvalidRequest; its message calls the text `what`."""
        self._count(_native.json_shape(text), what, param)
        return _decoded(text, what, param)

    async def read_long(self, text: bytes, what: str, held: Body) -> Any:
        """Like `read`, for a body; what it becomes is held, too. Raises BuffersFull besides.

        Numbers of schemas that would be rounded are refused.

        A long text is counted in a thread, so that the event loop is not blocked.
        """
        shape = await _shape(text)
        self._count(shape, what, None)
        await held.take_most(decoded_bytes(text, shape))
        try:
            value = _decoded(text, what, None)
        except InvalidRequest:
            await _check_long(text)  # one too large for any double is not even decoded
            raise
        if isinstance(value, dict) and has_schemas(value):
            await _check_long(text)
        if len(text) > _LONG_BYTES:
            await asyncio.sleep(0)
        return value

    async def read_parts(self, text: bytes, what: str, held: Body) -> dict[str, msgspec.Raw]:
        """Like `read_long`, of an object whose members stay text: each is read within limits of
        its own.
        """
        containers, *_, depth = await _shape(text)
        if depth > MAX_NESTING:
            raise InvalidRequest(f"{what} is nested deeper than {MAX_NESTING} levels")
        if containers > MAX_IN_PARTS:
            raise InvalidRequest(f"{what} has more than {MAX_IN_PARTS} lists and objects")
        await held.take_most(_CONTAINER_BYTES * containers)
        try:
            return msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        except msgspec.ValidationError as error:
            raise InvalidRequest(f"{what} must be a JSON object") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NotJson(f"{what} {_fault(text, str(error))}") from error

    def _count(self, shape: Shape, what: str, param: str | None) -> None:
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


async def _shape(text: bytes) -> Shape:
    if len(text) > _LONG_BYTES:
        return await asyncio.to_thread(_native.json_shape, text)
    return _native.json_shape(text)


def decoded_bytes(text: bytes, shape: Shape) -> int:
    """Return about how much memory a text's objects take at most."""
    containers, members, items, _ = shape
    objects = _CONTAINER_BYTES * containers + _MEMBER_BYTES * members + _ITEM_BYTES * items
    return _char_bytes(text) * len(text) + objects


def _char_bytes(text: bytes) -> int:
    """Return how many bytes a character of a string takes: as many as its widest one needs."""
    if text.isascii() and b"\\u" not in text:
        return 1
    return 4 if any(mark in text for mark in _WIDEST) else 2


def _decoded(text: bytes, what: str, param: str | None) -> Any:
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise NotJson(f"{what} {_fault(text, str(error))}", param) from error


def _fault(text: bytes, reason: str) -> str:
    """Return what is wrong with a text, for which the decoder gives this reason."""
    if not text.strip():
        return "is empty, but must be JSON"
    try:
        text.decode()
    except UnicodeDecodeError as error:  # the decoder counts bytes from the string that is wrong
        return f"is not valid UTF-8: {error.reason} (byte {error.start})"
    if "truncated" in reason and (half := _HALF_PAIR.search(text)):
        reason = f"half of a surrogate pair (byte {half.start()}): a character was cut in two"
    reason = reason.partition(" - at `")[0]  # the path is useless without a schema
    return f"is not valid JSON: {reason}"


# Most texts have no such number: these are rare even in what their strings say.
_SUSPECT = re.compile(rb"[0-9.]{16}|[0-9][eE][+-]?[0-9]{2}")
# What has schemas; a message of a WebSocket has a whole request as its `response`.
_FIELDS = frozenset(
    (
        *("response_format", "text", "tools", "functions", "structured_outputs"),
        *("guided_json", "json_schema"),
    )
)
_HOLDER = "response"
_EXAMPLES = frozenset(("default", "examples", "example"))
_MAX_BYTES = 2**18  # of one schema in which numbers are looked at
_MAX_CHARS = 40


class _Rounded(float):
    """A number whose text says more than the double does."""

    text: str


def has_schemas(request: dict[str, Any]) -> bool:
    """Whether a decoded request may have schemas."""
    return _HOLDER in request or not _FIELDS.isdisjoint(request)


async def _check_long(text: bytes) -> None:
    if len(text) > _MAX_BYTES:
        await asyncio.to_thread(check_request, text)
    else:
        check_request(text)


def check_request(text: bytes) -> None:
    """Refuse a request whose schemas have numbers that are lost; it need not be valid JSON.

    Raises InvalidRequest, which names the path.
    """
    fields = _parts(text, _FIELDS_DECODER, {})
    holder = _parts(bytes(fields.get(_HOLDER, b"")), _FIELDS_DECODER, {})
    for path, parts in (("", fields), (f"{_HOLDER}.", holder)):
        for name in _FIELDS & parts.keys():
            raw = bytes(parts[name])
            listed: list[msgspec.Raw] = _parts(raw, _LIST_DECODER, [])
            for index, one in enumerate(listed):
                check_exact(bytes(one), f"{path}{name}.{index}")
            if raw.startswith(b"{"):
                check_exact(raw, path + name)


def _parts(text: bytes, decoder: msgspec.json.Decoder[T], otherwise: T) -> T:
    """Return the parts of a text, undecoded; otherwise it is another kind, or no JSON."""
    try:
        return decoder.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return otherwise  # whoever decodes it says so


def check_exact(text: bytes, param: str) -> None:
    """Likewise for the text of one schema, or of what has it."""
    if not _SUSPECT.search(text):
        return
    if len(text) > _MAX_BYTES:
        raise InvalidRequest(
            f"'{param}' has numbers of 16 digits or an exponent, and {len(text)} bytes, but "
            f"they can be checked in schemas of at most {_MAX_BYTES}: shorten it",
            param,
        )
    try:
        value = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    for path, number in _rounded(value, (param,)):
        where = ".".join(path)
        shown = number.text if len(number.text) <= _MAX_CHARS else number.text[:_MAX_CHARS] + "..."
        raise InvalidRequest(
            f"'{where}' is {shown}, which has more digits, or is larger, than a double holds: it "
            "could not be enforced exactly",
            where,
        )


def _number(text: str) -> float:
    number = float(text)
    if Decimal(repr(number)) == Decimal(text):
        return number
    rounded = _Rounded(number)
    rounded.text = text
    return rounded


_DECODER: msgspec.json.Decoder[Any] = msgspec.json.Decoder(float_hook=_number)
_FIELDS_DECODER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST_DECODER = msgspec.json.Decoder(list[msgspec.Raw])


def _rounded(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], _Rounded]]:
    if isinstance(value, _Rounded):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            is_name = path[-1:] == ("properties",)
            if is_name or name not in _EXAMPLES:
                yield from _rounded(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _rounded(inner, (*path, str(index)))
