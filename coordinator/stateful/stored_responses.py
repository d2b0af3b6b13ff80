"""Endpoints on stored responses: /v1/responses/{id} and below."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.read.ask import Question
from coordinator.api.responses.objects import DeletedResponse
from coordinator.stateful.follow import Events
from coordinator.stateful.pages import check_include, show_page, whole_number
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import StoredResponse
from pdserve.shared.errors import InvalidRequest

_JSON = "application/json"
_CANCEL_S = 5.0  # how long to wait for a cancelled response to end
MAX_SEQUENCE_NUMBER = 10**9 - 1


async def get_response(store: ResponseStore, question: Question) -> web.Response | Events:
    """Return the stored response in its current state, or which of its events to send."""
    check_include(question.query)
    stored = await _stored(store, question)
    first = _first_event(question.query)
    if first is None:
        return web.Response(body=stored.body, content_type=_JSON)
    log = await store.log_of(stored)
    if log is None:
        raise InvalidRequest(
            f"{stored.id!r} cannot be streamed: only a response that was created with 'background' "
            "and 'stream' can be streamed again, until the coordinator is restarted",
            "stream",
        )
    return Events(log, first)


async def delete_response(store: ResponseStore, question: Question) -> web.Response:
    """Delete a stored response; responses that continued it are kept.

    If it is still being generated in the background, it is cancelled.
    """
    stored = await _stored(store, question)
    store.discard(stored)
    await store.saved()
    return json_answer(DeletedResponse(id=stored.id))


async def cancel_response(store: ResponseStore, question: Question) -> web.Response:
    """Cancel a background response, unless it has ended already, and return it.

    Raises InvalidRequest for any other response, whose client can disconnect instead.
    """
    stored = await _stored(store, question)
    if not stored.is_background:
        raise InvalidRequest(
            "Cannot cancel a synchronous response: only one created with 'background' can be.",
            "response_id",
        )
    await store.stop(stored, _CANCEL_S)
    return web.Response(body=(await _stored(store, question)).body, content_type=_JSON)


async def list_input_items(store: ResponseStore, question: Question) -> web.Response:
    """Return a page of the conversation that the response answers, newest first by default."""
    stored = await _stored(store, question)
    items = stored.items[: stored.num_input_items]
    return await show_page(items, question.query, question.trace.way_out)


async def _stored(store: ResponseStore, question: Question) -> StoredResponse:
    """Return the stored response named in the path, as it is now. Raises ResponseNotFound."""
    owner, response_id = question.trace.owner, question.names["response"]
    await store.look(owner, response_id)
    return store.get(response_id, owner)


def _first_event(query: Mapping[str, str]) -> int | None:
    """Return the number of the first event to stream, or None if no stream is requested.

    Raises InvalidRequest.
    """
    stream, after = query.get("stream", "false"), query.get("starting_after")
    if stream.lower() not in ("true", "false"):
        raise InvalidRequest(
            f"'stream' is {stream[:64]!r}, but must be 'true' or 'false'", "stream"
        )
    if stream.lower() == "false":
        if after is not None:
            raise InvalidRequest("'starting_after' needs 'stream' to be true", "starting_after")
        return None
    return 0 if after is None else 1 + whole_number("starting_after", after, 0, MAX_SEQUENCE_NUMBER)
