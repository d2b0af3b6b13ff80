"""What can be done with a response that was stored: /v1/responses/{id} and below."""

from __future__ import annotations

import msgspec
from aiohttp import web
from msgspec import Struct

from coordinator.api.context import CONTEXT, TRACE
from coordinator.api.responses_api.objects import DeletedResponse, ItemList
from coordinator.api.responses_api.store import StoredResponse
from pdserve.errors import InvalidRequest

_JSON = "application/json"
_NOT_SERVED = ("stream", "starting_after", "include", "include[]")
DEFAULT_ITEMS = 20
MAX_ITEMS = 100


async def get_response(request: web.Request) -> web.Response:
    """The response."""
    _check_query(request)
    return web.Response(body=_stored(request).body, content_type=_JSON)


async def delete_response(request: web.Request) -> web.Response:
    """It can be fetched no more, nor gone on from; those that went on from it stay."""
    response_id = request.match_info["response"]
    request.app[CONTEXT].stored.delete(response_id, request[TRACE].owner)
    return _json(DeletedResponse(id=response_id))


async def cancel_response(request: web.Request) -> web.Response:
    """None can be: it is over, or its client is still there to hang up. Raises InvalidRequest."""
    response_id = _stored(request).id
    raise InvalidRequest(
        f"{response_id!r} cannot be cancelled: only responses in the background can, and there "
        "are none here",
        "response_id",
    )


async def list_input_items(request: web.Request) -> web.Response:
    """A page of the conversation that the response answers, the newest first unless asked."""
    _check_query(request)
    stored, query = _stored(request), request.query
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' is {order[:64]!r}, not 'asc' or 'desc'", "order")
    items = list(stored.items[: stored.num_input_items])
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        begin = next((i + 1 for i, item in enumerate(items) if item.id == after), None)
        if begin is None:
            raise InvalidRequest(f"'after' is {after[:128]!r}, which is none of the items", "after")
        items = items[begin:]
    page = items[: _limit(query.get("limit"))]
    return _json(
        ItemList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(items) > len(page),
        )
    )


def _stored(request: web.Request) -> StoredResponse:
    """Raises ResponseNotFound."""
    return request.app[CONTEXT].stored.get(request.match_info["response"], request[TRACE].owner)


def _check_query(request: web.Request) -> None:
    for name in _NOT_SERVED:
        if request.query.get(name, "false").lower() != "false":
            raise InvalidRequest(f"{name!r} is not supported for a stored response", name)


def _limit(text: str | None) -> int:
    if text is None:
        return DEFAULT_ITEMS
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    if not 1 <= limit <= MAX_ITEMS:
        raise InvalidRequest(
            f"'limit' is {text[:64]!r}, not a number from 1 to {MAX_ITEMS}", "limit"
        )
    return limit


def _json(body: Struct) -> web.Response:
    return web.Response(body=msgspec.json.encode(body), content_type=_JSON)
