"""Stored responses and conversations as they are written to a file, and read again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import copy

import msgspec

from coordinator.stateful.storage.order import Order
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes, packed_before
from coordinator.stateful.storage.stored import EventLog, Stored, StoredConversation, StoredResponse


class SavedResponse(msgspec.Struct, kw_only=True, tag="response"):
    """A stored response, as the file has it."""

    body: bytes
    items: tuple[msgspec.Raw, ...]
    num_input_items: int
    items_bytes: int
    is_answer: bool
    is_background: bool
    order: Order | None = None  # while it is being made, and can be begun again


class SavedConversation(msgspec.Struct, kw_only=True, tag="conversation"):
    """A stored conversation, as the file has it."""

    created_at: int
    metadata: dict[str, str]
    items: tuple[msgspec.Raw, ...]
    items_bytes: int
    last_call: tuple[str, int]


_ENTRY = msgspec.msgpack.Decoder(SavedResponse | SavedConversation)


def encoder_of(stored: Stored, *, has_items: bool = True) -> Callable[[], bytes]:
    """Return what encodes an entry as it is now, for another thread; without its items if asked."""
    items = _raw(stored.items) if has_items else ()
    saved: SavedResponse | SavedConversation
    if isinstance(stored, StoredResponse):
        saved = SavedResponse(
            body=stored.body,
            items=items,
            num_input_items=stored.num_input_items,
            items_bytes=stored.items_bytes,
            is_answer=stored.is_answer,
            is_background=stored.is_background,
            order=None if stored.is_answer else copy(stored.order),
        )
    else:
        saved = SavedConversation(
            created_at=stored.created_at,
            metadata=dict(stored.metadata),
            items=items,
            items_bytes=stored.items_bytes,
            last_call=stored.last_call,
        )
    return lambda: msgspec.msgpack.encode(saved)


def decoded(owner: str, stored_id: str, entry: bytes) -> Stored:
    """Return an entry of a file.

    Raises msgspec.MsgspecError.
    """
    saved = _ENTRY.decode(entry)
    items = [packed_before(bytes(item)) for item in saved.items]
    if isinstance(saved, SavedConversation):
        return StoredConversation(
            id=stored_id,
            owner=owner,
            created_at=saved.created_at,
            metadata=saved.metadata,
            items=items,
            items_bytes=items_bytes(items),
            last_call=saved.last_call,
        )
    return StoredResponse(
        id=stored_id,
        owner=owner,
        body=saved.body,
        items=tuple(items),
        num_input_items=saved.num_input_items,
        items_bytes=items_bytes(items),
        is_answer=saved.is_answer,
        is_background=saved.is_background,
        log=EventLog() if saved.order is not None and saved.order.is_streamed else None,
        order=saved.order,
    )


def _raw(items: Iterable[PackedItem]) -> tuple[msgspec.Raw, ...]:
    return tuple(msgspec.Raw(item.packed) for item in items)


def failure(message: str) -> dict[str, object]:
    """Return the fields of a response that failed as its coordinator ended."""
    return {"status": "failed", "error": {"code": "coordinator_lost", "message": message}}
