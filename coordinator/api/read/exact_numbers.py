"""Numbers that a double does not hold, where a client's schema has them.

Decoders round the numbers of a text without a word. In a schema that would be another constant or
bound than the client's, so it is refused by name. Whole numbers stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec

from pdserve.errors import InvalidRequest

# Most texts have no such number: these are rare even in what their strings say.
_SUSPECT = re.compile(rb"[0-9.]{16}|[0-9][eE][+-]?[0-9]{2}")
# What has schemas; a message of a WebSocket has a whole request as its `response`.
_FIELDS = frozenset(
    (
        *("response_format", "text", "tools", "functions", "structured_outputs"),
        *("guided_json", "json_schema"),
    )
)
_HOLDERS = _FIELDS | {"response"}
_EXAMPLES = frozenset(("default", "examples", "example"))
_MAX_BYTES = 2**18  # more is not enforced anyway
_MAX_CHARS = 40


class _Rounded(float):
    """A number whose text says more than the double does."""

    text: str


def has_schemas(request: dict[str, Any]) -> bool:
    """Whether a decoded request may have schemas."""
    return not _HOLDERS.isdisjoint(request)


def check_request(text: bytes) -> None:
    """Refuse a request whose schemas have numbers that are lost; it need not be valid JSON.

    Raises InvalidRequest, which names the path.
    """
    try:
        fields = _FIELDS_DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return  # whoever decodes it says so
    for name in _HOLDERS & fields.keys():
        check_exact(bytes(fields[name]), name, is_schema=name in _FIELDS)


def check_exact(text: bytes, param: str, *, is_schema: bool = True) -> None:
    """Likewise for the text of one parameter."""
    if len(text) > _MAX_BYTES or not _SUSPECT.search(text):
        return
    try:
        value = _DECODER.decode(text)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return
    for path, number in _rounded(value, (param,), is_schema):
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


def _rounded(
    value: Any, path: tuple[str, ...], is_schema: bool
) -> Iterator[tuple[tuple[str, ...], _Rounded]]:
    if isinstance(value, _Rounded):
        if is_schema:
            yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            is_name = path[-1:] == ("properties",)
            if is_name or name not in _EXAMPLES:
                yield from _rounded(inner, (*path, name), is_schema or name in _FIELDS)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _rounded(inner, (*path, str(index)), is_schema)
