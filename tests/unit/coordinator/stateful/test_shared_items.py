"""Items of conversations in PostgreSQL: one more is written, and not all."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from coordinator.stateful.storage.saved_entries import encoder_of
from coordinator.stateful.storage.stored import MAX_ITEMS
from pdserve.shared.errors import InvalidRequest
from tests.unit.coordinator.stateful.test_shared_entries import (
    added,
    item,
    seen_by,
    sharing,
    talk,
    url,
)
from tests.unit.coordinator.stateful.test_store_file import answered

__all__ = ["url"]  # a fixture


async def test_only_what_is_new_of_a_conversation_is_written_and_read(url: str) -> None:
    connection = await asyncpg.connect(url)

    async def rows() -> list[tuple[int, int]]:
        found = await connection.fetch("SELECT seq, length(item) FROM pdserve_items ORDER BY seq")
        return [(seq, length) for seq, length in found]

    async with sharing(url, 2) as (one, other):
        one.put(talk())
        await one.saved()
        mine, theirs = await seen_by(one), await seen_by(other)
        known: list[tuple[int, int]] = []
        for number in range(6):
            one.change(mine, lambda c, n=number: c.add([item(2 * n), item(2 * n + 1)]))
            await one.saved()
            assert (await rows())[: len(known)] == known, "they are not written again"
            known = await rows()
            had = list(theirs.items)
            assert (await seen_by(other)) is theirs
            assert theirs.items == mine.items
            assert all(a is b for a, b in zip(had, theirs.items, strict=False)), "nor read"
        one.change(mine, lambda c: c.remove("fco_3"))
        other.change(theirs, lambda c: c.remove("fco_7"))
        await asyncio.gather(one.saved(), other.saved())
        assert await rows() == [known[n] for n in range(12) if n not in (3, 7)]
        assert (await seen_by(one)).items == (await seen_by(other)).items
        (length,) = await connection.fetchrow("SELECT length(packed) FROM pdserve_entries")
        assert length < 200
        one.discard(mine)
        await one.saved()
        assert await rows() == []
    await connection.close()


async def test_what_has_room_at_one_coordinator_only_is_refused(url: str) -> None:
    async with sharing(url, 2) as (one, other):
        full = talk()
        full.add([item(number) for number in range(MAX_ITEMS - 1)])
        one.put(full)
        await one.saved()
        mine, theirs = await seen_by(one), await seen_by(other)
        first, second = item(MAX_ITEMS), item(MAX_ITEMS + 1)
        one.change(mine, lambda c: c.add([first]))
        await one.saved()
        other.change(theirs, lambda c: c.add([second]))
        await other.saved()
        mine.check_kept([first])
        with pytest.raises(InvalidRequest, match="compact it, or begin a new one"):
            theirs.check_kept([second])
        assert theirs.items == mine.items
        assert len(mine.items) == MAX_ITEMS


_BACK_TO_1 = """
ALTER TABLE pdserve_entries RENAME COLUMN packed TO entry;
ALTER TABLE pdserve_entries DROP COLUMN items_bytes;
DROP TABLE pdserve_items;
UPDATE pdserve_schema SET version = 1;
"""


@pytest.mark.long
async def test_tables_of_schema_1_are_taken_over(url: str) -> None:
    async with sharing(url, 1) as (store,):
        store.put(answered("resp_a"))
        await store.saved()
    connection = await asyncpg.connect(url)
    await connection.execute(_BACK_TO_1)
    old = talk()
    old.add([item(1), item(2)], "u")
    entry = encoder_of(old)()
    insert = "INSERT INTO pdserve_entries (owner, id, entry) VALUES ($1, $2, $3)"
    await connection.execute(insert, old.owner, old.id, entry)
    async with sharing(url, 2) as (one, other):
        mine, theirs = await asyncio.gather(seen_by(one), seen_by(other))
        assert mine == theirs == old
        assert one.num_bytes == other.num_bytes
        await one.look("acme", "resp_a")
        assert one.get("resp_a", "acme") == answered("resp_a")
        one.change(mine, added(3))
        other.change(theirs, lambda c: c.remove("fco_1"))
        await asyncio.gather(one.saved(), other.saved())
        for store in (one, other):
            assert (await seen_by(store)).items == [item(2), item(3)]
        assert await connection.fetchval("SELECT count(*) FROM pdserve_items") == 2
    with pytest.raises(asyncpg.UndefinedColumnError):  # coordinators that know schema 1 only
        await connection.execute(insert, "acme", "conv_b", entry)
    await connection.close()
