"""Items of conversations as they are stored: packed, so that what they take is known.

Objects take several times what their text takes, and nobody counts them. A packed item is one
string of bytes, which goes to the disk as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import Final

import msgspec

from coordinator.api.responses.items import CallItem, KeptItem

_OBJECTS: Final = 200  # bytes of the item itself, its place in a list, and in the file's index
_ITEM: msgspec.msgpack.Decoder[KeptItem] = msgspec.msgpack.Decoder(KeptItem)


class _Head(msgspec.Struct, tag_field="type"):
    """What is looked for in items."""

    id: str


class _OfCall(_Head, tag="function_call"):
    call_id: str


class _OfMessage(_Head, tag="message"):
    pass


class _OfReasoning(_Head, tag="reasoning"):
    pass


class _OfOutput(_Head, tag="function_call_output"):
    pass


class _OfCompaction(_Head, tag="compaction"):
    pass


_HEAD = msgspec.msgpack.Decoder(_OfCall | _OfMessage | _OfReasoning | _OfOutput | _OfCompaction)


@dataclass(frozen=True, slots=True)
class PackedItem:
    """One item. Each object is once in its conversation, and in the responses of its calls."""

    id: str
    call_id: str  # of a call; of anything else, empty
    packed: bytes  # as MessagePack

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return getsizeof(self.packed) + getsizeof(self.id) + getsizeof(self.call_id) + _OBJECTS

    @property
    def item(self) -> KeptItem:
        """The item itself."""
        return _ITEM.decode(self.packed)


def pack(items: Iterable[KeptItem]) -> list[PackedItem]:
    """Return items as they are stored."""
    return [
        PackedItem(
            item.id,
            item.call_id if isinstance(item, CallItem) else "",
            msgspec.msgpack.encode(item),
        )
        for item in items
    ]


def packed_before(raw: bytes) -> PackedItem:
    """Return an item that was packed by `pack`. Raises msgspec.MsgspecError."""
    head = _HEAD.decode(raw)
    return PackedItem(head.id, head.call_id if isinstance(head, _OfCall) else "", raw)


def items_bytes(items: Sequence[PackedItem]) -> int:
    """Return the memory that items take."""
    return sum(item.num_bytes for item in items)
