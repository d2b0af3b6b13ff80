"""Endpoints on stored responses: /v1/responses/{id} and below."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.context import TRACE, outbox_of
from coordinator.api.responses.objects import DeletedResponse
from coordinator.stateful.follow import follow
from coordinator.stateful.pages import check_include, show_page, whole_number
from coordinator.stateful.storage.store import STORE
from coordinator.stateful.storage.stored import StoredResponse
from pdserve.shared.errors import InvalidRequest

_JSON = "application/json"
_CANCEL_S = 5.0  # how long to wait for a cancelled response to end
MAX_SEQUENCE_NUMBER = 10**9 - 1


async def get_response(request: web.Request) -> web.StreamResponse:
    """Return the stored response in its current state, or stream its events."""
    check_include(request.query)
    stored = await _stored(request)
    first = _first_event(request)
    if first is None:
        return web.Response(body=stored.body, content_type=_JSON)
    log = await request.app[STORE].log_of(stored)
    if log is None:
        raise InvalidRequest(
            f"{stored.id!r} cannot be streamed: only a response that was created with 'background' "
            "and 'stream' can be streamed again, until the coordinator is restarted",
            "stream",
        )
    return await follow(request, log, first)


async def delete_response(request: web.Request) -> web.Response:
    """Delete a stored response; responses that continued it are kept.

    If it is still being generated in the background, it is cancelled.
    """
    stored = await _stored(request)
    request.app[STORE].discard(stored)
    await request.app[STORE].saved()
    return json_answer(DeletedResponse(id=stored.id))


async def cancel_response(request: web.Request) -> web.Response:
    """Cancel a background response, unless it has ended already, and return it.

    Raises InvalidRequest for any other response, whose client can disconnect instead.
    """
    stored = await _stored(request)
    if not stored.is_background:
        raise InvalidRequest(
            "Cannot cancel a synchronous response: only one created with 'background' can be.",
            "response_id",
        )
    await request.app[STORE].stop(stored, _CANCEL_S)
    return web.Response(body=(await _stored(request)).body, content_type=_JSON)


async def list_input_items(request: web.Request) -> web.Response:
    """Return a page of the conversation that the response answers, newest first by default."""
    stored = await _stored(request)
    items = stored.items[: stored.num_input_items]
    return await show_page(items, request.query, outbox_of(request))


async def _stored(request: web.Request) -> StoredResponse:
    """Return the stored response named in the path, as it is now. Raises ResponseNotFound."""
    store, owner = request.app[STORE], request[TRACE].owner
    response_id = request.match_info["response"]
    await store.look(owner, response_id)
    return store.get(response_id, owner)


def _first_event(request: web.Request) -> int | None:
    """Return the number of the first event to stream, or None if no stream is requested.

    Raises InvalidRequest.
    """
    stream, after = request.query.get("stream", "false"), request.query.get("starting_after")
    if stream.lower() not in ("true", "false"):
        raise InvalidRequest(
            f"'stream' is {stream[:64]!r}, but must be 'true' or 'false'", "stream"
        )
    if stream.lower() == "false":
        if after is not None:
            raise InvalidRequest("'starting_after' needs 'stream' to be true", "starting_after")
        return None
    return 0 if after is None else 1 + whole_number("starting_after", after, 0, MAX_SEQUENCE_NUMBER)
