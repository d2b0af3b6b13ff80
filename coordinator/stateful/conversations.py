"""Endpoints on stored conversations: /v1/conversations and below."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.context import CONTEXT, TRACE, outbox_of
from coordinator.api.read.body import convert_request, read_object, read_request
from coordinator.api.responses.input_items import check_items
from coordinator.api.responses.objects import Conversation, DeletedConversation
from coordinator.api.responses.requests import (
    ConversationRequest,
    ConversationUpdate,
    InputItem,
    NewItems,
)
from coordinator.stateful.asked import look, new_items
from coordinator.stateful.pages import check_include, show_page, whole_page
from coordinator.stateful.storage.packed_items import PackedItem
from coordinator.stateful.storage.store import STORE
from coordinator.stateful.storage.stored import CONVERSATION_ID, StoredConversation


async def create_conversation(request: web.Request) -> web.Response:
    """Create a conversation, with the initial items if any are given."""
    context, trace = request.app[CONTEXT], request[TRACE]
    values = await read_object(request, context.config)
    check_items(values, "items")
    body = convert_request(values, ConversationRequest)
    stored = StoredConversation(
        id=CONVERSATION_ID.format(trace.unique),
        owner=trace.owner,
        created_at=int(time.time()),
        metadata=body.metadata or {},
    )
    items = await _new_items(request, values, body.items or [], [])
    stored.add(items)
    request.app[STORE].put(stored)
    await request.app[STORE].saved()
    return _shown(stored)


async def get_conversation(request: web.Request) -> web.Response:
    """Return a conversation's id, creation time and metadata."""
    return _shown(await _stored(request))


async def update_conversation(request: web.Request) -> web.Response:
    """Replace a conversation's metadata."""
    body = await read_request(request, ConversationUpdate, request.app[CONTEXT].config)
    stored = await _stored(request)  # only now, as it may be removed while the body is read
    request.app[STORE].change(stored, lambda c: c.describe(body.metadata or {}))
    await request.app[STORE].saved()
    return _shown(stored)


async def delete_conversation(request: web.Request) -> web.Response:
    """Delete a conversation; its stored responses are kept."""
    stored = await _stored(request)
    request.app[STORE].discard(stored)
    await request.app[STORE].saved()
    return json_answer(DeletedConversation(id=stored.id))


async def add_items(request: web.Request) -> web.Response:
    """Append items to a conversation, and return them."""
    check_include(request.query)
    values = await read_object(request, request.app[CONTEXT].config)
    check_items(values, "items")
    body = convert_request(values, NewItems)
    stored = await _stored(request)
    items = await _new_items(request, values, body.items, stored.items)
    request.app[STORE].change(stored, lambda c: c.add(items))
    await request.app[STORE].saved()
    stored.check_kept(items)
    return json_answer(whole_page(items))


async def list_items(request: web.Request) -> web.Response:
    """Return a page of a conversation's items, newest first by default."""
    items = (await _stored(request)).items
    return await show_page(items, request.query, outbox_of(request))


async def get_item(request: web.Request) -> web.Response:
    """Return one item of a conversation."""
    check_include(request.query)
    found = (await _stored(request)).find(request.match_info["item"])
    await outbox_of(request).reserve(len(found.packed))
    return json_answer(found.item)


async def delete_item(request: web.Request) -> web.Response:
    """Delete an item from a conversation."""
    stored = await _stored(request)
    stored.find(request.match_info["item"])
    request.app[STORE].change(stored, lambda c: c.remove(request.match_info["item"]))
    await request.app[STORE].saved()
    return _shown(stored)


async def _new_items(
    request: web.Request,
    values: dict[str, Any],
    given: list[InputItem],
    before: Sequence[PackedItem],
) -> list[PackedItem]:
    """Return validated items that come after those `before`. Raises InvalidRequest."""
    store, trace = request.app[STORE], request[TRACE]
    await look(values, store, trace.owner)
    return new_items(given, "items", trace, before, store)


async def _stored(request: web.Request) -> StoredConversation:
    """Return the conversation named in the path, as it is now. Raises ConversationNotFound."""
    store, owner = request.app[STORE], request[TRACE].owner
    conversation_id = request.match_info["conversation"]
    await store.look(owner, conversation_id)
    return store.get_conversation(conversation_id, owner)


def _shown(stored: StoredConversation) -> web.Response:
    return json_answer(
        Conversation(id=stored.id, created_at=stored.created_at, metadata=stored.metadata)
    )
