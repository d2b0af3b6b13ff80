"""Background responses that their coordinator did not finish: the next one does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from coordinator.stateful.again import go_on
from coordinator.stateful.storage.order import MAX_RUNS
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.store_file import StoreFile
from tests.fakes.generator import MODEL, FakeGenerator, waits_for
from tests.unit.coordinator.api.harness import Harness, client_of, served

ASKED: Any = {"model": MODEL, "input": "Hi", "background": True}


@pytest.fixture
async def path(tmp_path: Path) -> Path:
    """A file with one response, which its coordinator began and was stopped over."""
    path = tmp_path / "store.sqlite"
    async with (
        served(waits_for(asyncio.Event()), store=ResponseStore(backing=StoreFile(path))) as api,
        client_of(api) as client,
    ):
        await client.responses.create(**ASKED, stream=True)
        await api.server.stop(0.0)
    return path


@asynccontextmanager
async def next_one(
    path: Path, generator: FakeGenerator | None = None
) -> AsyncIterator[tuple[Harness, ResponseStore, asyncio.Event]]:
    """Another coordinator with the file, which has no nodes until the event is set."""
    ready, store = asyncio.Event(), ResponseStore(backing=StoreFile(path))
    async with served(generator, store=store) as api:
        go_on(api.server_context, store, ready)
        yield api, store, ready


async def test_it_is_finished_when_there_are_nodes(path: Path) -> None:
    async with next_one(path) as (api, store, ready), client_of(api) as client:
        (stored,) = store.unfinished()
        waiting = await client.responses.retrieve(stored.id)
        assert waiting.status == "in_progress"
        stream = await client.responses.retrieve(stored.id, stream=True)
        ready.set()
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        done = await client.responses.retrieve(stored.id)
        assert (done.output_text, done.created_at) == ("Hello world", waiting.created_at)
        assert store.unfinished() == []
    again = ResponseStore(backing=StoreFile(path))
    assert again.unfinished() == [], "and it is finished for good"
    await again.close()


async def test_one_that_is_stopped_again_is_left_to_the_one_after(path: Path) -> None:
    for num_runs in (1, 2):
        async with next_one(path, waits_for(asyncio.Event())) as (api, store, ready):
            (stored,) = store.unfinished()
            assert stored.order is not None
            assert stored.order.num_runs == num_runs
            ready.set()
            while store.get(stored.id, "") is stored:
                await asyncio.sleep(0)
            await api.server.stop(0.0)
    async with next_one(path) as (api, store, _), client_of(api) as client:
        (stored,) = store.unfinished()
        while stored.is_being_made:
            await asyncio.sleep(0)
        failed = await client.responses.retrieve(stored.id)
        assert failed.status == "failed", f"it was begun {MAX_RUNS} times"
        assert failed.error is not None
        assert failed.error.code == "coordinator_lost"
        assert store.unfinished() == []


async def test_one_that_waits_does_not_hold_up_the_end(path: Path) -> None:
    async with next_one(path) as (api, _, _):
        async with asyncio.timeout(30):
            await api.server.stop(60.0)
    again = ResponseStore(backing=StoreFile(path))
    assert len(again.unfinished()) == 1
    await again.close()


async def test_one_that_waits_can_be_cancelled(path: Path) -> None:
    async with next_one(path) as (api, store, ready), client_of(api) as client:
        (stored,) = store.unfinished()
        cancelled = await client.responses.cancel(stored.id)
        assert cancelled.status == "cancelled"
        ready.set()
        assert store.unfinished() == []
        assert api.generator.generations == []


async def test_a_tenant_that_is_gone_is_not_served(path: Path) -> None:
    async with next_one(path) as (_, store, ready):
        (stored,) = store.unfinished()
        stored.owner = "night"  # nobody has keys here
        ready.set()
        assert stored.making is not None
        await stored.making
        assert b'"failed"' in stored.body
