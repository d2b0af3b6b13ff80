"""A validated POST /v1/responses request, together with the conversation it continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import structs

from coordinator.api.context import RequestTrace
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.chat import MAX_MESSAGES, ChatRequest
from coordinator.api.responses.chat_request import chat_request, in_our_words
from coordinator.api.responses.input_items import check_items, items_of
from coordinator.api.responses.items import KeptItem
from coordinator.api.responses.messages import messages_of
from coordinator.api.responses.requests import InputItem, ResponseRequest
from coordinator.models.model import Model
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes, pack
from coordinator.stateful.storage.store import ResponseStore, response_of
from coordinator.stateful.storage.stored import StoredConversation, StoredResponse, check_length
from coordinator.text.tokenizer import PROBED_CHARS
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest

_MOST_BYTES_PER_TOKEN = 4 * PROBED_CHARS  # far more than texts have
_FEW_BYTES = 2**20  # of objects, which are no text
FindResponse = Callable[[str], StoredResponse | None]  # response id |-> response


def _find_nothing(response_id: str) -> None:
    """Find no response: only stored ones can be continued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What one call asks for."""

    body: ResponseRequest
    model: Model
    store: ResponseStore  # of what it continues, and of its own response
    conversation: StoredConversation | None
    earlier: Sequence[PackedItem]  # items of the conversation that is continued
    earlier_bytes: int
    new: Sequence[PackedItem]
    items: list[KeptItem]  # all items of the conversation to answer
    order: bytes = b""  # the body, as JSON, if it is to run in the background and be stored

    def chat(self, items: Sequence[KeptItem]) -> ChatRequest:
        """Return the chat request for these items. Raises InvalidRequest."""
        with in_our_words():
            chat = chat_request(self.body, messages_of(items))
        chat.stream = self.body.stream
        return chat


async def read_asked(
    ask: Ask, store: ResponseStore, find_local: FindResponse = _find_nothing
) -> Asked:
    """Validate a body and find what it continues; `find_local` finds responses not in the store.

    Raises InvalidRequest, ModelNotFound, ResponseNotFound, ConversationNotFound or
    StoreUnavailable.
    """
    await look(ask.values, store, ask.trace.owner)
    return await _asked_by(ask, store, find_local)


async def look(values: dict[str, Any], store: ResponseStore, owner: str) -> None:
    """Have what a body refers to as other coordinators left it. Raises StoreUnavailable."""
    named = values.get("conversation")
    items = values.get("input") or values.get("items")
    ids = [
        values.get("previous_response_id"),
        named.get("id") if isinstance(named, dict) else named,
        *(
            response_of(item.get("id"))
            for item in (items[:MAX_MESSAGES] if isinstance(items, list) else ())
            if isinstance(item, dict) and item.get("type") in (None, "item_reference")
        ),
    ]
    await store.look(owner, *{i for i in ids if isinstance(i, str)})


async def _asked_by(ask: Ask, store: ResponseStore, find_local: FindResponse) -> Asked:
    values, trace = ask.values, ask.trace
    order = msgspec.json.encode(values) if values.get("background") is True else b""
    check_items(values, "input")
    body = convert_request(values, ResponseRequest)
    model = await ask.model(body.model)
    body = structs.replace(body, model=model.name if body.model is None else body.model)
    _check_input(body)
    _check_background(body)
    owner = trace.owner
    conversation = _conversation(body, store, owner)
    earlier: Sequence[PackedItem] = ()
    earlier_bytes = 0
    if conversation is not None:
        earlier = conversation.before(trace.unique)
        is_all = len(earlier) == len(conversation.items)
        earlier_bytes = conversation.items_bytes if is_all else items_bytes(earlier)
    elif body.previous_response_id is not None:
        before = find_local(body.previous_response_id)
        if before is None:
            before = store.get_previous(body.previous_response_id, owner)
        earlier, earlier_bytes = before.items, before.items_bytes
    new = new_items(body.input or [], "input", trace, earlier, store)
    if earlier or conversation is not None:
        num_bytes = earlier_bytes + items_bytes(new)
        check_length(len(earlier) + len(new), num_bytes, "input")
        if body.truncation != "auto":
            _check_fits(num_bytes, model)
    return Asked(
        body=body,
        model=model,
        store=store,
        conversation=conversation,
        earlier=earlier,
        earlier_bytes=earlier_bytes,
        new=new,
        items=[packed.item for packed in (*earlier, *new)],
        order=order,
    )


def new_items(
    given: str | Sequence[InputItem],
    param: str,
    trace: RequestTrace,
    before: Sequence[PackedItem],
    store: ResponseStore,
) -> list[PackedItem]:
    """Return validated items that come after those `before`. Raises InvalidRequest."""
    called = {packed.call_id for packed in before if packed.call_id}

    def find(item_id: str) -> KeptItem | None:
        there = next((packed for packed in before if packed.id == item_id), None)
        found = there or store.find_item(item_id, trace.owner)
        return None if found is None else found.item

    return pack(items_of(given, param, trace.unique, called, find))


def _check_fits(num_bytes: int, model: Model) -> None:
    """Refuse a conversation that cannot fit into the context, before it is read.

    Raises ContextLengthExceeded.
    """
    max_model_len = model.generator.max_model_len
    if max_model_len is not None and num_bytes > _MOST_BYTES_PER_TOKEN * max_model_len + _FEW_BYTES:
        raise ContextLengthExceeded(
            f"this model's maximum context length is {max_model_len} tokens, but the conversation "
            f"has {num_bytes} bytes already",
            "input",
        )


def _check_input(body: ResponseRequest) -> None:
    if body.input in (None, []) and body.previous_response_id is None and body.conversation is None:
        raise InvalidRequest(
            "the request needs 'input', or 'previous_response_id' or 'conversation' to go on from",
            "input",
        )


def _check_background(body: ResponseRequest) -> None:
    if body.background and body.store is False:
        raise InvalidRequest("'background' needs 'store' to be true", "background")


def _conversation(
    body: ResponseRequest, store: ResponseStore, owner: str
) -> StoredConversation | None:
    named = body.conversation
    if named is None:
        return None
    if body.previous_response_id is not None:
        raise InvalidRequest(
            "'conversation' and 'previous_response_id' cannot be combined", "conversation"
        )
    conversation_id = named if isinstance(named, str) else named.id
    return store.get_conversation(conversation_id, owner, "conversation")
