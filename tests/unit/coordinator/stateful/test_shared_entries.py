"""Stored responses and conversations that several coordinators share in PostgreSQL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import asyncpg
import pytest

from coordinator.api.responses.items import CallOutputItem
from coordinator.stateful.storage.opening import open_store
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes, pack
from coordinator.stateful.storage.shared import tables
from coordinator.stateful.storage.shared.entries import SharedEntries
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import StoredConversation
from pdserve.shared.errors import (
    ConfigError,
    ConversationNotFound,
    ItemNotFound,
    ResponseNotFound,
    StoreUnavailable,
)
from tests.postgres import Postgres
from tests.unit.coordinator.stateful.test_store_file import answered

BEAT_S = 0.05


@pytest.fixture
async def url(postgres: Postgres) -> str:
    return await postgres.new_database()


@asynccontextmanager
async def sharing(url: str, number: int, **limits: int) -> AsyncIterator[list[ResponseStore]]:
    """The stores of some coordinators."""
    stores = [
        ResponseStore(backing=SharedEntries(url, beat_s=BEAT_S), **limits) for _ in range(number)
    ]
    for store in stores:
        store.go_on(lambda _: None)
    try:
        yield stores
    finally:
        for store in stores:
            await store.close()


def item(number: int) -> PackedItem:
    return pack([CallOutputItem(id=f"fco_{number}", call_id="call", output=str(number))])[0]


def added(number: int) -> Callable[[StoredConversation], None]:
    return lambda talk: talk.add([item(number)])


def talk(name: str = "conv_a") -> StoredConversation:
    return StoredConversation(id=name, owner="acme", created_at=7, metadata={"a": "b"})


async def seen_by(store: ResponseStore, name: str = "conv_a") -> StoredConversation:
    await store.look("acme", name)
    return store.get_conversation(name, "acme")


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        while not await holds():
            await asyncio.sleep(BEAT_S / 5)


@pytest.mark.parametrize("given", ["\0", "\udcff"], ids=["nul", "half"])
async def test_what_no_id_can_be_is_not_there(url: str, given: str) -> None:
    async with sharing(url, 1) as (one,):
        await one.look("acme", given)
        with pytest.raises(ConversationNotFound):
            one.get_conversation(given, "acme")


async def test_what_one_has_stored_the_others_have(url: str) -> None:
    async with sharing(url, 2) as (one, other):
        one.put(answered("resp_a"))
        one.put(talk())
        await one.saved()
        await other.look("acme", "resp_a", "conv_a")
        assert other.get("resp_a", "acme") == answered("resp_a")
        assert other.get_conversation("conv_a", "acme") == talk()
        await other.look("night", "resp_a")
        with pytest.raises(ResponseNotFound):
            other.get("resp_a", "night")

        other.discard(other.get("resp_a", "acme"))
        await other.saved()
        await one.look("acme", "resp_a")
        with pytest.raises(ResponseNotFound):
            one.get("resp_a", "acme")


async def test_it_outlives_all_coordinators(url: str) -> None:
    async with sharing(url, 1) as (store,):
        store.put(answered("resp_a"))
        store.put(talk())
    async with sharing(url, 1) as (store,):
        await store.look("acme", "resp_a", "conv_a")
        assert store.get("resp_a", "acme") == answered("resp_a")
        assert store.get_conversation("conv_a", "acme") == talk()


async def test_what_two_do_to_a_conversation_at_once_is_all_done(url: str) -> None:
    async with sharing(url, 2) as (one, other):
        one.put(talk())
        await one.saved()
        mine, theirs = await seen_by(one), await seen_by(other)
        for number in range(20):
            one.change(mine, added(2 * number))
            other.change(theirs, added(2 * number + 1))
            if number % 3 == 0:
                await asyncio.sleep(0)
            if number % 7 == 0:
                await asyncio.gather(one.saved(), other.saved())
        other.change(theirs, lambda c: c.describe({"c": "d"}))
        await asyncio.gather(one.saved(), other.saved())
        shown = await seen_by(one)
        assert shown is mine, "a call that is running has hold of it"
        assert {i.id for i in shown.items} == {f"fco_{number}" for number in range(40)}
        assert len(shown.items) == 40
        evens = [item(2 * number) for number in range(20)]
        assert [i for i in shown.items if i in evens] == evens, "each one's are in its order"
        assert shown == await seen_by(other)
        assert shown.metadata == {"c": "d"}
        assert shown.items_bytes == items_bytes(shown.items)


async def test_an_item_that_both_remove_is_removed(url: str) -> None:
    async with sharing(url, 2) as (one, other):
        first = talk()
        for number in range(3):
            added(number)(first)
        one.put(first)
        await one.saved()
        mine, theirs = await seen_by(one), await seen_by(other)
        one.change(mine, lambda c: c.remove("fco_1"))
        other.change(theirs, lambda c: c.remove("fco_1"))
        await asyncio.gather(one.saved(), other.saved())
        assert (await seen_by(one)).items == (await seen_by(other)).items == [item(0), item(2)]
        with pytest.raises(ItemNotFound):
            other.change(theirs, lambda c: c.remove("fco_1"))


async def test_a_conversation_that_was_deleted_takes_nothing(url: str) -> None:
    async with sharing(url, 2) as (one, other):
        one.put(talk())
        await one.saved()
        theirs = await seen_by(other)
        one.discard(await seen_by(one))
        await one.saved()
        other.change(theirs, added(1))
        await other.saved()
        for store in (one, other):
            with pytest.raises(ConversationNotFound):
                await seen_by(store)


async def test_what_memory_has_no_room_for_is_stored_all_the_same(url: str) -> None:
    async with sharing(url, 1, max_responses=2) as (store,):
        early = talk()
        store.put(early)
        for number in range(5):
            store.put(answered(f"resp_{number}"))
        await store.saved()
        assert len(store) == 2
        for number in range(5):
            await store.look("acme", f"resp_{number}")
            assert store.get(f"resp_{number}", "acme") == answered(f"resp_{number}")
        store.change(early, added(1))  # at the end of a long call
        await store.saved()
        assert (await seen_by(store)).items == [item(1)]


async def test_names_that_are_no_ids_are_not_asked_for(url: str) -> None:
    async with sharing(url, 1) as (store,):
        await store.look("acme", "resp_\0", "resp_ü", "'; DROP TABLE", "x" * 10_000)
        with pytest.raises(ResponseNotFound):
            store.get("resp_\0", "acme")


async def test_a_database_that_is_lost_is_waited_for(postgres: Postgres, url: str) -> None:
    async with sharing(url, 1) as (store,):
        store.put(answered("resp_a"))
        await store.saved()
        postgres.kill()
        try:
            with pytest.raises(StoreUnavailable):
                await store.look("acme", "resp_a")
            store.put(answered("resp_b"))
            with pytest.raises(StoreUnavailable):
                await store.saved()
        finally:
            postgres.start()
        connection = await asyncpg.connect(url)

        async def is_written() -> bool:
            return bool(await connection.fetchval("SELECT count(*) = 2 FROM pdserve_entries"))

        await until(is_written)
        await connection.close()
        await store.look("acme", "resp_a", "resp_b")
        assert store.get("resp_b", "acme") == answered("resp_b")


async def test_a_coordinator_starts_without_its_database(unused_tcp_port: int) -> None:
    async with sharing(f"postgresql://x@127.0.0.1:{unused_tcp_port}/none", 1) as (store,):
        with pytest.raises(StoreUnavailable):
            await store.look("acme", "resp_a")


async def test_tables_of_another_schema_are_left_alone(url: str) -> None:
    async with sharing(url, 1) as (store,):
        await store.look("acme", "resp_a")
    connection = await asyncpg.connect(url)
    await connection.execute("UPDATE pdserve_schema SET version = $1", tables.VERSION + 1)
    async with sharing(url, 1) as (store,):
        with pytest.raises(StoreUnavailable):
            await store.look("acme", "resp_a")
    await connection.close()


async def test_the_largest_owner_loses_what_it_used_first(url: str) -> None:
    async with sharing(url, 1) as (store,):
        for number in range(8):
            store.put(answered(f"resp_{number}"))
            await store.saved()
        small = answered("resp_a")
        small.owner = "small"
        store.put(small)
    entries = SharedEntries(url, beat_s=BEAT_S, max_entries=4)
    store = ResponseStore(backing=entries)
    store.go_on(lambda _: None)
    connection = await asyncpg.connect(url)

    async def is_trimmed() -> bool:
        return bool(await connection.fetchval("SELECT count(*) <= 4 FROM pdserve_entries"))

    await until(is_trimmed)
    rows = await connection.fetch("SELECT owner, id FROM pdserve_entries ORDER BY owner, id")
    kept = [("acme", f"resp_{number}") for number in (5, 6, 7)]
    assert [tuple(row) for row in rows] == [*kept, ("small", "resp_a")]
    await connection.close()
    await store.close()


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("postgresql://me:secret@host/db", "PGPASSWORD"),
        ("postgresql://host:port/db", "not a URL"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        open_store(url, "model", 8000)
    assert "secret" not in str(refused.value)
