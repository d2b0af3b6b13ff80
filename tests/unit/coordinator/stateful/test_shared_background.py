"""Several coordinators that share their stored responses, as the official SDK sees them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import openai
import pytest

from coordinator.stateful.again import go_on
from coordinator.stateful.storage.shared.entries import SharedEntries
from coordinator.stateful.storage.store import ResponseStore
from tests.fakes.generator import MODEL, FakeGenerator, waits_for
from tests.matrix import matrix
from tests.postgres import Postgres
from tests.unit.coordinator.api.harness import Harness, client_of, served

ASKED: Any = {"model": MODEL, "input": "Hi", "background": True}


@pytest.fixture
async def url(postgres: Postgres) -> str:
    return await postgres.new_database()


@asynccontextmanager
async def coordinator(
    url: str, generator: FakeGenerator | None = None, beat_s: float = 1.0
) -> AsyncIterator[tuple[Harness, openai.AsyncOpenAI]]:
    store, ready = ResponseStore(backing=SharedEntries(url, beat_s=beat_s)), asyncio.Event()
    ready.set()
    async with served(generator, store=store) as api, client_of(api) as client:
        go_on(api.server_context, store, ready)
        yield api, client


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """The response, once it is not being made any more."""
    async with asyncio.timeout(30):
        while True:
            found = await client.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.01)


async def test_any_coordinator_answers_for_all(url: str) -> None:
    async with coordinator(url) as (_, one), coordinator(url) as (_, other):
        first = await one.responses.create(model=MODEL, input="Hi")
        assert await other.responses.retrieve(first.id) == first
        second = await other.responses.create(
            model=MODEL, input="And?", previous_response_id=first.id
        )
        items = (await one.responses.input_items.list(second.id)).data
        assert [i.type for i in items] == ["message"] * 3
        referring: Any = [{"type": "item_reference", "id": first.output[0].id}]
        await other.responses.create(model=MODEL, input=referring)

        talk = await one.conversations.create(metadata={"topic": "rain"})
        await other.responses.create(model=MODEL, input="Hi", conversation=talk.id)
        await one.responses.create(model=MODEL, input="Again", conversation=talk.id)
        shown = (await other.conversations.items.list(talk.id, order="asc")).data
        assert [getattr(i, "role", "") for i in shown] == ["user", "assistant"] * 2
        await one.conversations.delete(talk.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.create(model=MODEL, input="Hi", conversation=talk.id)
        await one.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(first.id)


async def test_what_one_makes_another_shows_and_streams(url: str) -> None:
    gate = asyncio.Event()
    async with (
        coordinator(url, waits_for(gate)) as (_, maker),
        coordinator(url) as (_, other),
    ):
        stream = await maker.responses.create(**ASKED, stream=True)
        events = []
        async for event in stream:
            events.append(event)
            if event.type == "response.in_progress":
                break
        response_id = events[0].response.id  # type: ignore[union-attr]
        assert (await other.responses.retrieve(response_id)).status == "in_progress"
        theirs = await other.responses.retrieve(response_id, stream=True)
        followed = [await anext(theirs)]
        gate.set()
        followed += [event async for event in theirs]
        events += [event async for event in stream]
        assert followed == events, "event for event"
        later = await other.responses.retrieve(response_id, stream=True, starting_after=2)
        assert [event async for event in later] == events[3:]
        done = await other.responses.retrieve(response_id)
        assert (done.status, done.output_text) == ("completed", "Hello world")
        plain = await maker.responses.create(**ASKED)
        await ended(other, plain.id)
        with pytest.raises(openai.BadRequestError, match="cannot be streamed"):
            await other.responses.retrieve(plain.id, stream=True)


@pytest.mark.long
@pytest.mark.parametrize("is_streamed", matrix([False, True], 1))
async def test_what_one_makes_another_cancels(url: str, is_streamed: bool) -> None:
    async with (
        coordinator(url, waits_for(asyncio.Event())) as (api, maker),
        coordinator(url) as (_, other),
    ):
        api.observer.over.clear()
        if is_streamed:
            stream = await maker.responses.create(**ASKED, stream=True)
            response_id = (await anext(stream)).response.id  # type: ignore[union-attr]
        else:
            response_id = (await maker.responses.create(**ASKED)).id
        cancelled = await other.responses.cancel(response_id)
        assert cancelled.status == "cancelled"
        async with asyncio.timeout(30):
            await api.observer.over.wait()
        assert api.generator.last.cancels
        assert (await maker.responses.retrieve(response_id)).status == "cancelled"


@pytest.mark.long
async def test_what_one_makes_another_deletes(url: str) -> None:
    async with (
        coordinator(url, waits_for(asyncio.Event())) as (api, maker),
        coordinator(url) as (_, other),
    ):
        begun = await maker.responses.create(**ASKED)
        api.observer.over.clear()
        await other.responses.delete(begun.id)
        async with asyncio.timeout(30):
            await api.observer.over.wait()
        with pytest.raises(openai.NotFoundError):
            await maker.responses.retrieve(begun.id)


async def test_what_a_coordinator_leaves_another_makes(url: str) -> None:
    async with coordinator(url) as (_, other):
        async with coordinator(url, waits_for(asyncio.Event())) as (api, maker):
            plain = await maker.responses.create(**ASKED)
            stream = await maker.responses.create(**ASKED, stream=True)
            streamed = (await anext(stream)).response  # type: ignore[union-attr]
            await api.server.stop(0.0)
        for begun in (plain, streamed):
            done = await ended(other, begun.id)
            assert (done.status, done.output_text) == ("completed", "Hello world")
            assert done.created_at == begun.created_at
        again = await other.responses.retrieve(streamed.id, stream=True)
        kinds = [event.type async for event in again]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")


async def test_a_coordinator_that_seemed_dead_gives_up_what_another_makes(
    url: str,
) -> None:
    gate = asyncio.Event()
    async with coordinator(url, waits_for(gate), beat_s=1000.0) as (api, maker):
        begun = await maker.responses.create(**ASKED)
        api.observer.over.clear()
        # As after a pause: its time has passed, and it does not know before it is told.
        async with coordinator(url) as (_, other):
            connection = await asyncpg.connect(url)
            dead = await connection.fetchval("SELECT maker FROM pdserve_entries")
            async with asyncio.timeout(30):
                while dead == await connection.fetchval("SELECT maker FROM pdserve_entries"):
                    await connection.execute(
                        "UPDATE pdserve_coordinators SET lives_until = now() WHERE id = $1", dead
                    )
            await connection.close()
            done = await ended(other, begun.id)
            assert done.status == "completed", done.error
            assert done.output_text == "Hello world"
            async with asyncio.timeout(30):
                await api.observer.over.wait()
            assert api.generator.last.cancels
            assert await maker.responses.retrieve(begun.id) == done
