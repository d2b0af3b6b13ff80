"""The paths of the Responses API; `operations` describes them: one row per route."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.calls import CALLS, about, call
from coordinator.api.routes import add_routes, post
from coordinator.stateful import conversations, endpoint, stored_responses
from coordinator.stateful.endpoint import COMPACT, endpoints
from coordinator.stateful.follow import told_or_followed
from coordinator.stateful.operations import OPERATIONS
from coordinator.stateful.storage.store import STORE, ResponseStore
from coordinator.stateful.websocket import respond_over_websocket

_RESPONSE = (
    "/v1/responses/{response:(?!(?:input_tokens|compact)$)[^/]+}"  # the excluded names are routes
)
_CONVERSATION = "/v1/conversations/{conversation}"

ROUTES = (
    post("/v1/responses", endpoint.create_response),
    web.get("/v1/responses", respond_over_websocket, allow_head=False),
    post(COMPACT, call),
    post("/v1/responses/input_tokens", endpoint.count_input_tokens),
    web.get(_RESPONSE, told_or_followed(stored_responses.get_response)),
    web.delete(_RESPONSE, about(STORE, stored_responses.delete_response)),
    web.get(f"{_RESPONSE}/input_items", about(STORE, stored_responses.list_input_items)),
    post(f"{_RESPONSE}/cancel", about(STORE, stored_responses.cancel_response)),
    post("/v1/conversations", about(STORE, conversations.create_conversation)),
    web.get(_CONVERSATION, about(STORE, conversations.get_conversation)),
    post(_CONVERSATION, about(STORE, conversations.update_conversation)),
    web.delete(_CONVERSATION, about(STORE, conversations.delete_conversation)),
    post(f"{_CONVERSATION}/items", about(STORE, conversations.add_items)),
    web.get(f"{_CONVERSATION}/items", about(STORE, conversations.list_items)),
    web.get(f"{_CONVERSATION}/items/{{item}}", about(STORE, conversations.get_item)),
    web.delete(f"{_CONVERSATION}/items/{{item}}", about(STORE, conversations.delete_item)),
)


def add_stateful_routes(app: web.Application, store: ResponseStore | None = None) -> None:
    """Add /v1/responses and /v1/conversations to the API; what they keep is kept in `store`."""
    app[STORE] = ResponseStore() if store is None else store
    app[CALLS] |= endpoints(app[STORE])
    app.on_cleanup.append(_close)
    add_routes(app, ROUTES, OPERATIONS)


async def _close(app: web.Application) -> None:
    await app[STORE].close()
