"""Endpoints on stored conversations: /v1/conversations and below."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.read.ask import Question
from coordinator.api.read.body import convert_request
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
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import CONVERSATION_ID, StoredConversation


async def create_conversation(store: ResponseStore, question: Question) -> web.Response:
    """Create a conversation, with the initial items if any are given."""
    values = await question.read()
    check_items(values, "items")
    body = convert_request(values, ConversationRequest)
    stored = StoredConversation(
        id=CONVERSATION_ID.format(question.trace.unique),
        owner=question.trace.owner,
        created_at=int(time.time()),
        metadata=body.metadata or {},
    )
    items = await _new_items(store, question, values, body.items or [], [])
    stored.add(items)
    store.put(stored)
    await store.saved()
    return _shown(stored)


async def get_conversation(store: ResponseStore, question: Question) -> web.Response:
    """Return a conversation's id, creation time and metadata."""
    return _shown(await _stored(store, question))


async def update_conversation(store: ResponseStore, question: Question) -> web.Response:
    """Replace a conversation's metadata."""
    body = await question.body(ConversationUpdate)
    stored = await _stored(store, question)  # only now, as it may be removed while the body is read
    store.change(stored, lambda c: c.describe(body.metadata or {}))
    await store.saved()
    return _shown(stored)


async def delete_conversation(store: ResponseStore, question: Question) -> web.Response:
    """Delete a conversation; its stored responses are kept."""
    stored = await _stored(store, question)
    store.discard(stored)
    await store.saved()
    return json_answer(DeletedConversation(id=stored.id))


async def add_items(store: ResponseStore, question: Question) -> web.Response:
    """Append items to a conversation, and return them."""
    check_include(question.query)
    values = await question.read()
    check_items(values, "items")
    body = convert_request(values, NewItems)
    stored = await _stored(store, question)
    items = await _new_items(store, question, values, body.items, stored.items)
    store.change(stored, lambda c: c.add(items))
    await store.saved()
    stored.check_kept(items)
    return json_answer(whole_page(items))


async def list_items(store: ResponseStore, question: Question) -> web.Response:
    """Return a page of a conversation's items, newest first by default."""
    items = (await _stored(store, question)).items
    return await show_page(items, question.query, question.trace.way_out)


async def get_item(store: ResponseStore, question: Question) -> web.Response:
    """Return one item of a conversation."""
    check_include(question.query)
    found = (await _stored(store, question)).find(question.names["item"])
    await question.trace.way_out.reserve(len(found.packed))
    return json_answer(found.item)


async def delete_item(store: ResponseStore, question: Question) -> web.Response:
    """Delete an item from a conversation."""
    stored = await _stored(store, question)
    stored.find(question.names["item"])
    store.change(stored, lambda c: c.remove(question.names["item"]))
    await store.saved()
    return _shown(stored)


async def _new_items(
    store: ResponseStore,
    question: Question,
    values: dict[str, Any],
    given: list[InputItem],
    before: Sequence[PackedItem],
) -> list[PackedItem]:
    """Return validated items that come after those `before`. Raises InvalidRequest."""
    await look(values, store, question.trace.owner)
    return new_items(given, "items", question.trace, before, store)


async def _stored(store: ResponseStore, question: Question) -> StoredConversation:
    """Return the conversation named in the path, as it is now. Raises ConversationNotFound."""
    owner, conversation_id = question.trace.owner, question.names["conversation"]
    await store.look(owner, conversation_id)
    return store.get_conversation(conversation_id, owner)


def _shown(stored: StoredConversation) -> web.Response:
    return json_answer(
        Conversation(id=stored.id, created_at=stored.created_at, metadata=stored.metadata)
    )
