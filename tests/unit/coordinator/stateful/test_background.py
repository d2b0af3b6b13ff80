"""Responses in the background as the official SDK sees them, and what becomes of their calls."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from coordinator.stateful.storage.store import ResponseStore
from pdserve.shared.errors import NodeLost, Overloaded
from tests.fakes.generator import (
    MODEL,
    FakeGenerator,
    Pause,
    Step,
    Tokens,
    tiny_tokenizer,
    waits_for,
)
from tests.unit.coordinator.api.harness import Harness, client_of, served

ASKED: Any = {"model": MODEL, "input": "Hi", "background": True}
HELLO = tiny_tokenizer().encode("Hello", add_special_tokens=False)


async def over(api: Harness) -> None:
    """Until the only call has been concluded."""
    async with asyncio.timeout(30):
        await api.observer.over.wait()


async def test_it_is_polled_until_it_is_there() -> None:
    gate = asyncio.Event()
    async with served(waits_for(gate)) as api, client_of(api) as client:
        begun = await client.responses.create(**ASKED)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        assert api.observer.finished == [], "the call is not over with its request"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model=MODEL, input="And?", previous_response_id=begun.id)
        assert refused.value.param == "previous_response_id"
        api.observer.over.clear()
        gate.set()
        await over(api)
        done = await client.responses.retrieve(begun.id)
        assert (done.status, done.output_text) == ("completed", "Hello world")
        assert await client.responses.cancel(begun.id) == done, "too late: it is what it is"
        later = await client.responses.create(
            model=MODEL, input="And?", previous_response_id=begun.id
        )
        assert later.previous_response_id == begun.id
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.retrieve(begun.id, stream=True)
        assert refused.value.param == "stream"
    assert done.usage is not None
    refusal, first, second = api.observer.finished
    assert (first.status, first.num_completion_tokens) == (200, done.usage.output_tokens)
    assert (refusal.status, second.status) == (400, 200)


async def test_a_poll_sees_that_it_has_begun() -> None:
    gate = asyncio.Event()
    async with served(waits_for(gate)) as api, client_of(api) as client:
        stream = await client.responses.create(**ASKED, stream=True)
        kinds = []
        async for event in stream:
            kinds.append(event.type)
            if event.type == "response.in_progress":
                seen = await client.responses.retrieve(event.response.id)
                assert (seen.status, seen.output) == ("in_progress", [])
                gate.set()
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"


async def test_a_stream_that_broke_off_is_taken_up_again() -> None:
    gate = asyncio.Event()
    async with served(waits_for(gate)) as api, client_of(api) as client:
        stream = await client.responses.create(**ASKED, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        response_id = events[0].response.id  # type: ignore[union-attr]
        last = events[-1].sequence_number
        reading = asyncio.ensure_future(_rest(client, response_id, last))
        gate.set()
        events += await reading
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events == await _rest(client, response_id, None), "the same to whoever comes"
        final = events[-1]
        assert final.type == "response.completed"
        assert final.response == await client.responses.retrieve(response_id)
        assert final.response.output_text == "Hello world"
        assert await _rest(client, response_id, 10**6) == []
    (summary,) = api.observer.finished
    assert (summary.status, summary.is_streaming) == (200, True)


async def _rest(client: openai.AsyncOpenAI, response_id: str, after: int | None) -> list[Any]:
    resumed: Any = {} if after is None else {"starting_after": after}
    stream = await client.responses.retrieve(response_id, stream=True, **resumed)
    return [event async for event in stream]


@pytest.mark.parametrize("way", ["cancel", "delete", "pushed out"])
async def test_what_is_not_wanted_any_more_ends(way: str) -> None:
    async with (
        served(waits_for(asyncio.Event()), store=ResponseStore(max_responses=1)) as api,
        client_of(api) as client,
    ):
        stream = await client.responses.create(**ASKED, stream=True)
        begun: Any = await anext(stream)
        if way == "cancel":
            cancelled = await client.responses.cancel(begun.response.id)
            assert (cancelled.status, cancelled.output_text) == ("cancelled", "Hello")
            assert await client.responses.cancel(begun.response.id) == cancelled
            assert await client.responses.retrieve(begun.response.id) == cancelled
        elif way == "delete":
            await client.responses.delete(begun.response.id)
        else:
            await client.conversations.create()
        last = [event async for event in stream][-1]
        assert last.type == "response.incomplete"
        assert last.response.status == "cancelled"
        await over(api)
        assert len(api.generator.last.cancels) == 1
        assert [(s.status, s.error_code) for s in api.observer.finished] == [(499, "cancelled")]


async def test_one_that_fails_says_so() -> None:
    script: list[Step] = [Tokens(HELLO), NodeLost("decode-0 is gone")]
    async with served(FakeGenerator(lambda _: script)) as api, client_of(api) as client:
        begun = await client.responses.create(**ASKED)
        await over(api)
        failed = await client.responses.retrieve(begun.id)
        assert (failed.status, failed.output_text) == ("failed", "Hello")
        assert failed.error is not None
        assert (failed.error.code, failed.error.message) == ("node_lost", "decode-0 is gone")
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model=MODEL, input="?", previous_response_id=begun.id)
    assert api.observer.finished[0].status == 502


async def test_one_that_is_refused_is_refused_at_once() -> None:
    generator = FakeGenerator(start_error=Overloaded("busy", 3.0))
    async with served(generator) as api, client_of(api) as client:
        with pytest.raises(openai.RateLimitError):
            await client.with_options(max_retries=0).responses.create(**ASKED)
    assert [summary.status for summary in api.observer.finished] == [429]


async def test_at_a_stop_it_may_end_or_is_told_to() -> None:
    for in_time in (True, False):
        gate = asyncio.Event()
        async with served(waits_for(gate)) as api, client_of(api) as client:
            stream = await client.responses.create(**ASKED, stream=True)
            begun: Any = await anext(stream)
            reading = asyncio.ensure_future(_all(stream))
            stopping = asyncio.create_task(api.server.stop(grace_s=10 if in_time else 0))
            if in_time:
                gate.set()
            last = (await reading)[-1]
            await stopping
            assert last.response.id == begun.response.id
            if in_time:
                assert last.type == "response.completed"
            else:
                assert last.type == "response.failed"
                assert "shutting down" in last.response.error.message


async def test_one_that_is_cancelled_before_it_began_is_over() -> None:
    """A store without room cancels it at once, before the first step of its task."""
    async with served(waits_for(asyncio.Event()), store=ResponseStore(max_bytes=1)) as api:
        async with api.client.post("/v1/responses", json={**ASKED, "stream": True}) as response:
            assert b"response.incomplete" in await response.read()
        await over(api)
        assert len(api.generator.last.cancels) == 1
        assert [(s.status, s.error_code) for s in api.observer.finished] == [(499, "cancelled")]


async def _all(stream: Any) -> list[Any]:
    return [event async for event in stream]


async def test_a_client_that_goes_away_changes_nothing() -> None:
    gate = asyncio.Event()
    async with served(waits_for(gate)) as api:
        asked = {**ASKED, "stream": True}
        async with api.client.post("/v1/responses", json=asked) as response:
            await response.content.readuntil(b"response.in_progress")
            response.close()
        gate.set()
        await over(api)
        assert api.generator.last.cancels == []
        assert [summary.status for summary in api.observer.finished] == [200]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("stream=perhaps", "stream"),
        ("starting_after=1", "starting_after"),
        ("stream=true&starting_after=-1", "starting_after"),
        ("stream=true&starting_after=x", "starting_after"),
        ("include=everything", "include"),
    ],
)
async def test_a_query_that_cannot_be_is_refused(query: str, param: str) -> None:
    script: list[Step] = [Pause(until=asyncio.Event())]
    async with served(FakeGenerator(lambda _: script)) as api, client_of(api) as client:
        begun = await client.responses.create(**ASKED)
        async with api.client.get(f"/v1/responses/{begun.id}?{query}") as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] == param
