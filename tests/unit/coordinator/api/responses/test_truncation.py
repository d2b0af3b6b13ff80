"""What is left out of a conversation that is too long, and that no more is than has to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.responses.items import (
    CallItem,
    CallOutputItem,
    InputText,
    KeptItem,
    MessageItem,
)
from coordinator.api.responses.truncation import droppable, fitted
from pdserve.shared.errors import ContextLengthExceeded
from tests.fakes.generator import MODEL, tool_tokenizer
from tests.unit.coordinator.api.harness import client_of, served, tail_of_prompt


def item_of(kind: str, i: int) -> KeptItem:
    match kind:
        case "c":
            return CallItem(id=f"{i}", call_id="c", name="f", status="completed")
        case "o":
            return CallOutputItem(id=f"{i}", call_id="c", output="")
    roles: Any = {"s": "system", "u": "user", "a": "assistant"}
    return MessageItem(id=f"{i}", role=roles[kind], content=[InputText(text="x")])


def items_of(kinds: str) -> list[KeptItem]:
    return [item_of(kind, i) for i, kind in enumerate(kinds)]


@pytest.mark.parametrize(
    ("kinds", "groups"),
    [
        ("u", []),
        ("su", []),
        ("ua", []),
        ("uau", [[0, 1]]),
        ("suaucou", [[1, 2], [3, 4, 5]]),
        ("aauau", [[0, 1], [2, 3]]),
        ("usau", [[0, 2]]),
        ("ucoccooaco", [[1, 2], [3, 4, 5, 6]]),
        ("uauco", [[0, 1]]),
    ],
)
def test_what_belongs_together_goes_together(kinds: str, groups: list[list[int]]) -> None:
    assert droppable(items_of(kinds)) == groups


@given(st.text("suaco", min_size=1, max_size=30), st.integers(0, 30))
async def test_as_much_as_fits_is_left(kinds: str, room: int) -> None:
    items = items_of(kinds)

    async def attempt(left: Sequence[KeptItem]) -> Sequence[KeptItem]:
        if len(left) > room:
            raise ContextLengthExceeded("too long", "input")
        return left

    groups = droppable(items)
    must_stay = len(items) - sum(map(len, groups))
    try:
        left = await fitted(items, attempt)
    except ContextLengthExceeded:
        assert must_stay > room
        return
    gone = [i for i, item in enumerate(items) if item not in left]
    going = list(accumulate(groups, initial=[]))  # when so many groups go
    num_groups = [len(places) for places in going].index(len(gone))
    assert gone == sorted(going[num_groups])
    if num_groups:
        assert len(left) + len(groups[num_groups - 1]) > room, "no more than had to"


async def test_the_oldest_turns_go_and_the_rest_is_answered() -> None:
    turns: Any = [
        {"role": role, "content": f"{i} " + "again and again " * 20}
        for i in range(12)
        for role in ("user", "assistant")
    ]
    asked: Any = {"model": MODEL, "input": [*turns, {"role": "user", "content": "Now?"}]}
    async with served(None, tool_tokenizer()) as api, client_of(api) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(**asked, truncation="disabled")
        assert refused.value.code == "context_length_exceeded"
        counted = await client.responses.input_tokens.count(**asked, truncation="auto")
        answer = await client.responses.create(
            **asked, truncation="auto", instructions="Be brief.", max_output_tokens=9
        )
        prompt = tail_of_prompt(api)
        assert prompt.startswith("<|system|>Be brief.<|user|>")
        assert prompt.endswith("<|user|>Now?<|assistant|>")
        assert answer.truncation == "auto"
        assert answer.usage is not None
        assert counted.input_tokens < 512
        assert 512 - 200 < answer.usage.input_tokens <= 512 - 9
        items = client.responses.input_items.list(answer.id, limit=100)
        assert len([item async for item in items]) == 25, "what was given is kept whole"
