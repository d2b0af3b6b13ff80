"""A request's body: from bytes on a socket to a checked struct, or an error naming the place."""

from __future__ import annotations

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from coordinator.api.config import ApiConfig
from coordinator.api.parameters import check_parameters
from pdserve.errors import InvalidRequest

_T = TypeVar("_T", bound=msgspec.Struct)
_PLACE = re.compile(r"^(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
_FIELD = re.compile(r"(?:missing required|contains unknown) field `(?P<name>[^`]*)`")


async def read_request(request: web.Request, schema: type[_T], config: ApiConfig) -> _T:
    """Read and decode a JSON body. Raises InvalidRequest or an aiohttp HTTP error."""
    return convert_request(await read_object(request, config), schema)


async def read_object(request: web.Request, config: ApiConfig) -> dict[str, Any]:
    """Read a JSON body that is an object. Raises InvalidRequest or an aiohttp HTTP error."""
    body = await _read_body(request, config)
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequest("the request body must be a JSON object")
    return values


def convert_request(values: dict[str, Any], schema: type[_T]) -> _T:
    """A body's fields, typed. Raises InvalidRequest that names the parameter at fault."""
    check_parameters(values, schema)
    try:
        return msgspec.convert(values, schema)
    except msgspec.ValidationError as error:
        raise _at_parameter(str(error)) from error


async def _read_body(request: web.Request, config: ApiConfig) -> bytes:
    kind = request.content_type
    is_json = kind == "application/json" or kind.endswith("+json")
    if "Content-Type" in request.headers and not is_json:
        raise web.HTTPUnsupportedMediaType(
            text=f"the request body must be application/json, not {kind}"
        )
    try:
        async with asyncio.timeout(config.body_timeout_s):
            return await request.read()
    except TimeoutError as error:
        raise web.HTTPRequestTimeout(
            text=f"the request body did not arrive within {config.body_timeout_s:g} s"
        ) from error
    except web.RequestPayloadError as error:
        what = " ".join(str(error).split())
        raise InvalidRequest(f"the request body cannot be read: {what}") from error


def _at_parameter(message: str) -> InvalidRequest:
    """The decoder's message says `what` and, unless it is the top, `where`."""
    match = _PLACE.match(message)
    what, path = (match["what"], match["path"] or "") if match else (message, "")
    if field := _FIELD.search(what):
        path = f"{path}.{field['name']}" if path else field["name"]
    path = path.replace("[...]", "")
    if not path:
        return InvalidRequest(what)
    return InvalidRequest(f"invalid {path!r}: {what[:1].lower()}{what[1:]}", path)
