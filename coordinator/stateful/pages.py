"""Pagination of item lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import get_args

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.responses.objects import ItemList
from coordinator.api.responses.requests import Includable
from coordinator.api.server.outbox import HttpOutbox
from coordinator.stateful.storage.packed_items import PackedItem
from pdserve.shared.errors import InvalidRequest

DEFAULT_ITEMS = 20
MAX_ITEMS = 100
MAX_BYTES = 2**20  # of a page with more than one item, as they are stored
INCLUDE = ("include", "include[]")  # SDKs use either name
_INCLUDABLE = frozenset(get_args(Includable))


async def show_page(
    kept: Sequence[PackedItem], query: Mapping[str, str], outbox: HttpOutbox
) -> web.Response:
    """Return the page that the query selects, newest first by default; waits for space for it.

    Raises InvalidRequest or BuffersFull.
    """
    items, has_more = _selected(kept, query)
    await outbox.reserve(sum(len(item.packed) for item in items))
    return json_answer(whole_page(items, has_more=has_more))


def _selected(
    kept: Sequence[PackedItem], query: Mapping[str, str]
) -> tuple[list[PackedItem], bool]:
    """Return the items of a page, and whether there are more. Raises InvalidRequest."""
    check_include(query)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest(f"'order' is {order[:64]!r}, but must be 'asc' or 'desc'", "order")
    items = list(kept)
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        begin = next((i + 1 for i, item in enumerate(items) if item.id == after), None)
        if begin is None:
            raise InvalidRequest(
                f"'after' is {after[:128]!r}, which is not the id of an item in this list", "after"
            )
        items = items[begin:]
    page = _within_bytes(items[: _limit(query.get("limit"))])
    return page, len(items) > len(page)


def whole_page(items: Sequence[PackedItem], *, has_more: bool = False) -> ItemList:
    """Return a list object with exactly these items."""
    return ItemList(
        data=[packed.item for packed in items],
        first_id=items[0].id if items else None,
        last_id=items[-1].id if items else None,
        has_more=has_more,
    )


def _within_bytes(items: list[PackedItem]) -> list[PackedItem]:
    """Return the first item, and those after it that do not make the page too large."""
    num_bytes = 0
    for i, item in enumerate(items):
        num_bytes += len(item.packed)
        if i and num_bytes > MAX_BYTES:
            return items[:i]
    return items


def check_include(query: Mapping[str, str]) -> None:
    """Validate `include`, which has no effect: stored items have all data that exists.

    Raises InvalidRequest.
    """
    for name in INCLUDE:
        if (wanted := query.get(name)) is not None and wanted not in _INCLUDABLE:
            known = " or ".join(sorted(map(repr, _INCLUDABLE)))
            raise InvalidRequest(f"'include' is {wanted[:64]!r}, but must be {known}", "include")


def whole_number(name: str, text: str, least: int, most: int) -> int:
    """Parse an integer query parameter and check its range. Raises InvalidRequest."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else least - 1
    if not least <= number <= most:
        raise InvalidRequest(
            f"{name!r} is {text[:64]!r}, but must be a number from {least} to {most}", name
        )
    return number


def _limit(text: str | None) -> int:
    return DEFAULT_ITEMS if text is None else whole_number("limit", text, 1, MAX_ITEMS)
