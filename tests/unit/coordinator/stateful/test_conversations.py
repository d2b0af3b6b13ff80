"""Conversations as the official SDK sees them, and responses that go on in them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest

from coordinator.api.responses.items import MessageItem
from coordinator.stateful.storage.packed_items import pack
from coordinator.stateful.storage.stored import MAX_ITEMS, StoredConversation
from pdserve.shared.errors import InvalidRequest
from tests.fakes.generator import MODEL, FakeGenerator, Pause, Tokens, says, tool_tokenizer
from tests.matrix import matrix
from tests.unit.coordinator.api.answer.test_tools import CALL
from tests.unit.coordinator.api.harness import client_of, served, tail_of_prompt
from tests.unit.coordinator.api.test_tenants import bearer, clock, tenants, usage
from tests.unit.coordinator.stateful.test_background import over
from tests.unit.coordinator.stateful.test_responses import TOOLS

__all__ = ["clock", "tenants", "usage"]  # fixtures


async def test_a_conversation_has_its_life() -> None:
    async with served() as api, client_of(api) as client:
        made = await client.conversations.create(metadata={"a": "b"})
        assert (made.object, made.metadata) == ("conversation", {"a": "b"})
        assert await client.conversations.retrieve(made.id) == made
        updated = await client.conversations.update(made.id, metadata={"c": "d"})
        assert (updated.id, updated.metadata) == (made.id, {"c": "d"})
        assert (await client.conversations.update(made.id, metadata=None)).metadata == {}
        deleted = await client.conversations.delete(made.id)
        assert (deleted.object, deleted.id) == ("conversation.deleted", made.id)
        with pytest.raises(openai.NotFoundError) as gone:
            await client.conversations.retrieve(made.id)
        assert gone.value.code == "conversation_not_found"


async def test_items_are_added_listed_and_taken_out() -> None:
    async with served() as api, client_of(api) as client:
        made = await client.conversations.create(items=[{"role": "user", "content": "One"}])
        more: Any = [{"role": "assistant", "content": t} for t in ("Two", "Three")]
        added = await client.conversations.items.create(made.id, items=more)
        assert [item.content[0].text for item in added.data] == ["Two", "Three"]  # type: ignore[union-attr]
        items: Any = [
            item async for item in client.conversations.items.list(made.id, order="asc", limit=2)
        ]
        assert [item.content[0].text for item in items] == ["One", "Two", "Three"]
        of_it = {"conversation_id": made.id}
        assert await client.conversations.items.retrieve(items[1].id, **of_it) == items[1]
        assert (await client.conversations.items.delete(items[1].id, **of_it)).id == made.id
        for gone in (client.conversations.items.retrieve, client.conversations.items.delete):
            with pytest.raises(openai.NotFoundError) as refused:
                await gone(items[1].id, **of_it)
            assert refused.value.code == "item_not_found"
        left = await client.conversations.items.list(made.id)
        assert [item.id for item in left.data] == [items[2].id, items[0].id]


@pytest.mark.parametrize(
    "how", matrix([{}, {"background": True}, {"store": False}, {"stream": True}], 2)
)
async def test_responses_go_on_in_it(how: dict[str, Any]) -> None:
    generator = FakeGenerator(says(f"I look.\n{CALL}"))
    async with served(generator, tool_tokenizer()) as api, client_of(api) as client:
        made = await client.conversations.create(items=[{"role": "user", "content": "Hi"}])
        asked: Any = {"model": MODEL, "conversation": made.id, "tools": TOOLS, **how}
        answer: Any = await client.responses.create(**asked, input="Rain?")
        if "stream" in how:
            events = [event async for event in answer]
            answer = events[-1].response
        await over(api)
        assert answer.conversation.id == made.id
        items: Any = (await client.conversations.items.list(made.id, order="asc")).data
        assert [item.type for item in items] == ["message"] * 3 + ["function_call"]
        api.generator.script = says("Dry.")
        output: Any = {
            "type": "function_call_output",
            "call_id": items[-1].call_id,
            "output": "0 mm",
        }
        again: Any = {
            **asked,
            "conversation": {"id": made.id},
            "stream": False,
            "background": False,
        }
        await client.responses.create(**again, input=[output])
        assert tail_of_prompt(api).endswith(
            "<|user|>Hi<|user|>Rain?<|assistant|>I look.weather(Paris)<|tool|>0 mm<|assistant|>"
        )
        items = (await client.conversations.items.list(made.id, order="asc")).data
        assert [item.type for item in items[4:]] == ["function_call_output", "message"]


async def test_what_fails_leaves_it_as_it_was() -> None:
    generator = FakeGenerator(lambda _: [Tokens([5]), RuntimeError("a bug")])
    async with served(generator) as api, client_of(api) as client:
        made = await client.conversations.create()
        with pytest.raises(openai.InternalServerError):
            await client.with_options(max_retries=0).responses.create(
                model=MODEL, input="Hi", conversation=made.id
            )
        assert (await client.conversations.items.list(made.id)).data == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    matrix(
        [
            ("", {"items": [{"role": "user"}]}, "items[0].content"),
            ("", {"items": [{"role": "user", "content": "x", "audio": 1}]}, "items[0].audio"),
            ("", {"items": [{"role": "user", "content": "x"}] * 21}, "items"),
            ("", {"metadata": {"a": 1}}, "metadata"),
            ("/{}", {}, "metadata"),
            ("/{}/items", {"items": []}, "items"),
            (
                "/{}/items",
                {"items": [{"type": "function_call_output", "call_id": "c", "output": "x"}]},
                "items[0].call_id",
            ),
        ],
        3,
    ),
)
async def test_what_cannot_be_is_refused_by_name(path: str, body: Any, param: str) -> None:
    async with served() as api, client_of(api) as client:
        made = await client.conversations.create()
        url = "/v1/conversations" + path.format(made.id)
        async with api.client.post(url, json=body) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/conversations/{}/items"])
async def test_an_item_is_referred_to_once(path: str) -> None:
    async with served() as api, client_of(api) as client:
        made = await client.conversations.create(items=[{"role": "user", "content": "Hi"}])
        (item,) = (await client.conversations.items.list(made.id)).data
        twice = [{"type": "item_reference", "id": item.id}] * 2
        body = {"model": MODEL, "conversation": made.id, "input": twice}
        if "items" in path:
            body = {"items": twice}
        async with api.client.post(path.format(made.id), json=body) as response:
            assert response.status == 400
            param = (await response.json())["error"]["param"]
        assert param == ("items[1].id" if "items" in path else "input[1].id")


async def test_it_goes_on_from_one_thing_only() -> None:
    async with served() as api, client_of(api) as client:
        made = await client.conversations.create()
        first = await client.responses.create(model=MODEL, input="Hi")
        asked: Any = {"model": MODEL, "input": "Hi"}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(
                **asked, conversation=made.id, previous_response_id=first.id
            )
        assert refused.value.param == "conversation"
        for nothing in ("conv_1", first.id):
            with pytest.raises(openai.NotFoundError) as gone:
                await client.responses.create(**asked, conversation=nothing)
            assert gone.value.param == "conversation"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_it_is_its_tenants_alone(tenants: Any, tmp_path: Path) -> None:
    async with served(tenants=tenants) as api:
        async with api.client.post(
            "/v1/conversations", json={}, headers=bearer("acme-1")
        ) as response:
            url = f"/v1/conversations/{(await response.json())['id']}"
        for key, status in (("acme-2", 200), ("night", 404), ("nobody", 401)):
            async with api.client.get(url, headers=bearer(key)) as response:
                assert response.status == status


def messages(num_items: int, num_chars: int) -> list[Any]:
    return [{"role": "user", "content": "x" * num_chars} for _ in range(num_items)]


async def test_a_page_has_few_bytes_and_says_that_there_is_more() -> None:
    async with served() as api, client_of(api) as client:
        made = await client.conversations.create(items=messages(8, 300_000))
        first = await client.conversations.items.list(made.id, limit=100)
        assert (len(first.data), first.has_more) == (3, True)
        shown = [item async for item in client.conversations.items.list(made.id, limit=100)]
        assert len(shown) == len({item.id for item in shown}) == 8
        large = await client.conversations.create(items=messages(2, 2_000_000))
        assert len((await client.conversations.items.list(large.id)).data) == 1


async def test_a_conversation_has_bounds() -> None:
    talk = StoredConversation(id="conv_a", owner="", created_at=0, metadata={})
    talk.add(pack(MessageItem(id=str(i)) for i in range(MAX_ITEMS - 1)))
    with pytest.raises(InvalidRequest, match="compact it, or begin a new one"):
        talk.add(talk.items[:2])
    talk.add(talk.items[:1])
    assert len(talk.items) == MAX_ITEMS
    async with served() as api, client_of(api) as client:
        made = await client.conversations.create(items=messages(2, 1_500_000))
        more = messages(1, 1_500_000)
        again: Any = {"model": MODEL, "input": more, "truncation": "auto"}
        for refused in (
            client.conversations.items.create(made.id, items=more),
            client.conversations.create(items=messages(3, 1_500_000)),
            client.responses.create(conversation=made.id, **again),
        ):
            with pytest.raises(openai.BadRequestError, match="compact it, or begin a new one"):
                await refused
        with pytest.raises(openai.BadRequestError, match=r"the conversation has \d+ bytes already"):
            await client.responses.create(model=MODEL, input="More", conversation=made.id)
        empty = await client.conversations.create()
        with pytest.raises(openai.BadRequestError, match="compact it, or begin a new one"):
            await client.responses.create(
                model=MODEL, input=messages(3, 1_500_000), conversation=empty.id
            )
        assert api.generator.generations == []


@pytest.mark.parametrize(
    "how", matrix([{}, {"stream": True}, {"background": True}, {"store": False}], 1)
)
async def test_calls_at_the_same_time_do_not_make_it_too_long(how: dict[str, Any]) -> None:
    """Each of them would have room alone; the one that comes too late fails, and says so."""
    is_filled = asyncio.Event()
    generator = FakeGenerator(lambda _: [Pause(until=is_filled), *says("Hi")(_)])
    async with served(generator) as api, client_of(api) as client:
        made = await client.conversations.create()
        asked: Any = {"model": MODEL, "input": "Hi", "conversation": made.id, **how}

        async def outcome() -> Any:
            try:
                answer: Any = await client.responses.create(**asked)
                return [e async for e in answer][-1].response if "stream" in how else answer
            except openai.BadRequestError as error:
                return error

        late = asyncio.create_task(outcome())
        while not api.generator.generations:
            await asyncio.sleep(0)
        before = await client.conversations.items.create(made.id, items=messages(2, 2_096_600))
        is_filled.set()
        ended = await late
        if "background" in how:
            await over(api)
            ended = await client.responses.retrieve(ended.id)
        assert "compact it, or begin a new one" in str(getattr(ended, "error", None) or ended)
        if isinstance(ended, openai.BadRequestError):
            assert ended.param == "conversation"
        else:
            assert ended.status == "failed"
        kept = await client.conversations.items.list(made.id, order="asc", limit=1)
        assert kept.data[0].id == before.data[0].id
