"""Drops items of a conversation that is too long for the context: `truncation: "auto"`.

The oldest items are dropped first, in groups that belong together: whole turns, then calls of the
last turn with their outputs. Instructions, system messages, the last user message and the last
group after it are always kept.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar

from coordinator.api.responses.items import CallOutputItem, KeptItem, MessageItem
from pdserve.shared.errors import ContextLengthExceeded

T = TypeVar("T")


async def fitted(
    items: Sequence[KeptItem], attempt: Callable[[Sequence[KeptItem]], Awaitable[T]]
) -> T:
    """Return the result of `attempt` on as many of the items as fit.

    Raises ContextLengthExceeded when even the items that must be kept do not fit.
    """
    try:
        return await attempt(items)
    except ContextLengthExceeded:
        groups = droppable(items)
        if not groups:
            raise
    fewest, most = 1, len(groups)  # bounds of the number of groups to drop
    made = await attempt(_without(items, groups[:most]))
    while fewest < most:
        middle = (fewest + most) // 2
        try:
            made = await attempt(_without(items, groups[:middle]))
            most = middle
        except ContextLengthExceeded:
            fewest = middle + 1
    return made


def droppable(items: Sequence[KeptItem]) -> list[list[int]]:
    """Return groups of item indices to drop together, in the order in which to drop them."""
    last_question = max((i for i, item in enumerate(items) if _is_question(item)), default=-1)
    groups: list[list[int]] = []
    for i, item in enumerate(items):
        if i == last_question or _is_instruction(item):
            continue
        if not groups or _begins_group(items, i, last_question):
            groups.append([])
        groups[-1].append(i)
    if groups and groups[-1][-1] > last_question:
        groups.pop()  # the last group is kept
    return groups


def _begins_group(items: Sequence[KeptItem], i: int, last_question: int) -> bool:
    if i <= last_question:
        return _is_question(items[i])
    follows_output = isinstance(items[i - 1], CallOutputItem)
    is_output = isinstance(items[i], CallOutputItem)
    return i == last_question + 1 or (follows_output and not is_output)


def _is_question(item: KeptItem) -> bool:
    return isinstance(item, MessageItem) and item.role == "user"


def _is_instruction(item: KeptItem) -> bool:
    return isinstance(item, MessageItem) and item.role in ("system", "developer")


def _without(items: Sequence[KeptItem], groups: Sequence[Sequence[int]]) -> list[KeptItem]:
    gone = set(chain.from_iterable(groups))
    return [item for i, item in enumerate(items) if i not in gone]
