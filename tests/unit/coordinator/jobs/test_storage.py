"""Leases, and answers that are written once: in SQLite, and in PostgreSQL for several."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from coordinator.jobs.routes import open_jobs
from coordinator.jobs.storage import tables
from coordinator.jobs.storage.batches import (
    PIECE,
    Batch,
    BatchDocument,
    Batches,
    Line,
    LineState,
)
from coordinator.jobs.storage.database import Database, FairThread, Row, Step
from coordinator.jobs.storage.files import CHUNK_BYTES, Files
from pdserve.shared.errors import InvalidRequest, ItemNotFound, StoreUnavailable
from tests.full_disk import full_disk
from tests.postgres import Postgres
from tests.unit.coordinator.api.harness import served
from tests.unit.coordinator.jobs.played import cluster
from tests.unit.coordinator.jobs.test_batches import content, create, ended, line, upload


@pytest_asyncio.fixture(params=["sqlite", "postgres"])
async def where(request: pytest.FixtureRequest, tmp_path: Path) -> str | Path:
    if request.param == "sqlite":
        return tmp_path / "jobs"
    return str(await request.getfixturevalue("postgres").new_database())


@pytest_asyncio.fixture
async def database(where: str | Path) -> AsyncIterator[Database]:
    opened = open_jobs(where)
    yield opened
    await opened.close()


def some_batch(number: int = 1, owner: str = "a") -> Batch:
    document = BatchDocument(endpoint="/v1/completions", total=3)
    return Batch(f"batch_{number}", owner, "batch", "in_progress", number, 2**40, document)


LINES = [Line(n, f"line-{n}", prefix, b"{}") for n, prefix in ((1, b"b"), (2, b"a"), (3, b"b"))]


async def test_one_coordinator_holds_a_batch_until_its_lease_ends(database: Database) -> None:
    batches = Batches(database)
    await batches.add(some_batch(), LINES)
    both = await asyncio.gather(batches.claim("x", 30.0), batches.claim("y", 30.0))
    assert sorted(map(len, both)) == [0, 1], "however they come together"
    holder, other = ("x", "y") if both[0] else ("y", "x")
    (held,) = await batches.claim(holder, 0.05)
    async with asyncio.timeout(20):
        while not await batches.claim(other, 30.0):
            await asyncio.sleep(0.01)
    held.status = "finalizing"
    further = (tables.DROP_TALLY, held.id)
    assert not await batches.go_on(held, holder, further), "it was another's by then"
    assert await batches.counts(held) == [{0: 3}], "so nothing else is done"
    await batches.release(other)
    assert len(await batches.claim(holder, 30.0)) == 1
    assert await batches.go_on(held, holder, further)
    assert await batches.counts(held) == [{}]


async def test_tenants_have_their_oldest_batches_run(database: Database) -> None:
    batches = Batches(database)
    for number in range(9):
        await batches.add(some_batch(number))
    await batches.add(some_batch(99, "b"))
    held = await batches.claim("x", 30.0)
    assert sorted(batch.created_at for batch in held) == [0, 1, 2, 3, 99]
    await batches.cancel(some_batch(7))
    held[0].status = "completed"
    assert await batches.go_on(held[0], "x")
    later = {batch.created_at for batch in await batches.claim("y", 30.0)}
    assert len(later) == 2
    assert 7 in later, "what is cancelled need not wait"


async def test_a_line_has_the_first_answer_that_is_written(database: Database) -> None:
    batches, batch = Batches(database), some_batch()
    await batches.add(batch, LINES)
    left = await batches.left(batch, None, 2)
    assert [one.number for one in left] == [2, 1], "those that begin alike stand together"
    assert [one.number for one in await batches.left(batch, left[-1], 9)] == [3]
    await asyncio.gather(
        *(
            batches.answer(batch, LINES[0], LineState.SUCCEEDED, text)
            for text in (b"one", b"two", b"three")
        )
    )
    (answered,) = await batches.answered(batch, -1, 9)
    await batches.answer(batch, LINES[0], LineState.ERRORED, b"late")
    assert await batches.answered(batch, -1, 9) == [answered]
    assert await batches.counts(batch) == [{0: 2, 1: 1}]
    assert await batches.end_lines(batch, LineState.CANCELED) == {1: 1, 3: 2}


async def test_a_batch_that_is_to_be_cancelled_only_ends(database: Database) -> None:
    batches, batch = Batches(database), some_batch()
    await batches.add(batch)
    (held,) = await batches.claim("x", 30.0)
    assert await batches.cancel(some_batch()) is not None
    assert await batches.cancel(some_batch()) is None
    held.status = "finalizing"
    assert not await batches.go_on(held, "x")
    held.status = "cancelled"
    assert await batches.go_on(held, "x")
    assert (await batches.get("a", held.id, "batch")).status == "cancelled"
    assert await batches.claim("x", 30.0) == []
    with pytest.raises(ItemNotFound):
        await batches.get("b", held.id, "batch")
    with pytest.raises(ItemNotFound):
        await batches.get("a", held.id, "messages")


async def test_only_its_holder_reads_a_batch(database: Database) -> None:
    batches, batch = Batches(database), some_batch()
    batch.status = "validating"
    await batches.add(batch)
    await batches.claim("frozen", 0.0)
    assert await batches.claim("y", 30.0)
    assert await batches.forget_lines(batch, "y")
    assert await batches.add_lines(batch, "y", LINES)
    assert not await batches.forget_lines(batch, "frozen"), "it would take them from the other"
    assert not await batches.add_lines(batch, "frozen", [Line(9, "line-9", b"", b"{}")])
    assert await batches.counts(batch) == [{0: 3}]
    batch.status = "in_progress"
    assert await batches.go_on(batch, "y")
    assert not await batches.forget_lines(batch, "y")


async def test_lines_are_written_marked_and_deleted_some_at_a_time(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To write 20,000 at once keeps a database from all others for seconds."""
    batches, batch, run, most = Batches(database), some_batch(), database.run, 0

    async def measured(*steps: Step, **how: Any) -> list[list[Row]]:
        nonlocal most
        found = await run(*steps, **how)
        most = max(most, len(steps), *map(len, found))
        return found

    monkeypatch.setattr(database, "run", measured)
    await batches.add(batch, [Line(n, f"line-{n}", b"", b"{}") for n in range(600)])
    assert await batches.counts(batch) == [{0: 600}]
    await batches.answer(batch, LINES[0], LineState.SUCCEEDED, b"yes")
    assert await batches.end_lines(batch, LineState.EXPIRED) == {1: 1, 4: 599}
    await batches.drop_lines(batch)
    assert await batches.counts(batch) == [{}]
    assert PIECE < most <= PIECE + 2
    await database.run(("UPDATE pdserve_batches SET status = 'validating'",))
    await batches.claim("x", 30.0)
    await batches.add_lines(batch, "x", LINES)
    assert await batches.forget_lines(batch, "x")
    assert await batches.counts(batch) == [{}]


async def test_a_batch_of_which_a_part_has_arrived_is_not_there(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches, run, refused = Batches(database), database.run, [tables.ARRIVES, tables.DROP_BATCH]
    late: list[str] = []

    async def failing(*steps: Step, **how: Any) -> list[list[Row]]:
        if steps[0][0] in refused:
            raise StoreUnavailable("the disk is gone")
        if steps[0][0] in late:
            await run((tables.RELEASE_ALL,), (tables.DROP_ARRIVING,))
        return await run(*steps, **how)

    monkeypatch.setattr(database, "run", failing)
    lines = [Line(n, f"line-{n}", b"", b"{}") for n in range(600)]
    with pytest.raises(StoreUnavailable):
        await batches.add(some_batch(), lines)
    with pytest.raises(ItemNotFound):
        await batches.get("a", "batch_1", "batch")
    assert await batches.page("a", "batch", behind=None, limit=9) == []
    assert await batches.claim("x", 30.0) == []
    young = some_batch(2)
    refused.clear()
    await batches.add(young, LINES)
    await batches.drop_old(0)
    (rows,) = await database.run(("SELECT count(*) FROM pdserve_lines",))
    assert rows == [(600 + len(LINES),)], "it may be on its way"
    await batches.release(None)  # its time has passed
    await batches.drop_old(0)
    (rows,) = await database.run(("SELECT DISTINCT batch FROM pdserve_lines",))
    assert rows == [(young.id,)], "what a killed coordinator leaves is deleted"
    late.append(tables.ARRIVES)
    with pytest.raises(StoreUnavailable, match="no lines were stored for 60 s"):
        await batches.add(some_batch(4), lines)
    late.clear()
    refused[:] = [tables.ARRIVES]
    with pytest.raises(StoreUnavailable):
        await batches.add(some_batch(3), lines)
    (rows,) = await database.run(("SELECT DISTINCT batch FROM pdserve_lines",))
    assert rows == [(young.id,)], "and a living one leaves nothing"


async def test_tenants_have_turns_at_a_thread() -> None:
    thread, order = FairThread(), list[str]()
    is_running, gate = threading.Event(), threading.Event()

    def call(owner: str) -> asyncio.Task[None]:
        return asyncio.create_task(thread.run(owner, lambda: order.append(owner)))

    def block() -> None:
        is_running.set()
        gate.wait()

    blocking = asyncio.create_task(thread.run("many", block))
    await asyncio.to_thread(is_running.wait)
    many = [call("many") for _ in range(9)]
    given_up = call("given up")
    await asyncio.sleep(0)  # all of them ask
    few = call("few")
    await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    gate.set()
    await asyncio.gather(blocking, few, *many)
    assert order.index("few") == 1, "behind one more of whoever has many"
    assert order.count("many") == 9
    assert "given up" not in order
    with pytest.raises(ZeroDivisionError):
        await thread.run("few", lambda: 1 // 0)
    thread.shutdown()


async def test_tenants_have_turns_at_a_shared_database(postgres: Postgres) -> None:
    database, order = open_jobs(await postgres.new_database()), list[str]()
    batches = Batches(database)
    await database.run()  # its tables are there

    async def looks(owner: str) -> None:
        await batches.page(owner, "batch", behind=None, limit=9)
        order.append(owner)

    many = [asyncio.create_task(looks("many")) for _ in range(99)]
    await asyncio.sleep(0)  # all of them ask
    await looks("few")
    assert len(order) < 20, "it waits for what runs, and for one more of each tenant"
    await asyncio.gather(*many)
    await database.close()


async def test_pages_and_what_is_too_old(database: Database) -> None:
    batches, files = Batches(database), Files(database)
    for number in range(5):
        await batches.add(some_batch(number))
    page = await batches.page("a", "batch", behind=None, limit=3)
    rest = await batches.page("a", "batch", behind=page[-1], limit=3)
    assert [batch.created_at for batch in (*page, *rest)] == [4, 3, 2, 1, 0]
    back = await batches.page("a", "batch", behind=page[-1], limit=9, newest_first=False)
    assert [batch.created_at for batch in back] == [3, 4]
    for keep_s in (-1, 60):
        upload = files.begin("a")
        await upload.add(b"x" * 10)
        await files.done(upload, "f", "batch", keep_s)
    cut_off = files.begin("a")
    await cut_off.add(b"x" * 2**20)
    await files.drop_old()
    (kept,) = await files.page("a", after=None, limit=9, newest_first=True, purpose="batch")
    assert [chunk async for chunk in files.read("a", kept.id)] == [b"x" * 10]
    with pytest.raises(ItemNotFound):
        await files.get("b", kept.id)
    (rows,) = await database.run(("SELECT count(*) FROM pdserve_chunks",))
    assert rows == [(2,)], "an upload that is running is none that was cut off"


async def test_coordinators_drop_what_is_old_at_the_same_time(database: Database) -> None:
    files = Files(database)
    for _ in range(3):
        upload = files.begin("a")
        await upload.add(b"x" * 10)
        await files.done(upload, "f", "batch", -1)
    await asyncio.gather(*(Files(database).drop_old() for _ in range(3)))
    (rows,) = await database.run(("SELECT count(*) FROM pdserve_chunks",))
    assert rows == [(0,)]


async def test_a_full_disk_keeps_no_coordinator_from_starting(tmp_path: Path) -> None:
    with full_disk():
        database = open_jobs(tmp_path / "jobs")
        with pytest.raises(StoreUnavailable):
            await Batches(database).add(some_batch(), LINES)
    await Batches(database).add(some_batch(), LINES)
    assert await Batches(database).counts(some_batch()) == [{0: 3}]
    await database.close()


async def test_a_batch_runs_in_any_database(where: str | Path) -> None:
    async with served(cluster(), jobs=open_jobs(where)) as api:
        given = [line(n) for n in range(9)]
        batch = await ended(api, await create(api, (await upload(api, given))["id"]))
        assert len(await content(api, batch["output_file_id"])) == 9


async def test_bytes_that_arrive_have_room_before_their_files_are_whole(tmp_path: Path) -> None:
    database = open_jobs(tmp_path / "jobs")
    database.max_bytes, part = 4000, 500
    files = Files(database)
    for owner in ("a", "a", "a", "a", "b"):
        await files.arrive(owner, part)
    with pytest.raises(InvalidRequest, match="2500 bytes would be stored"):
        await files.arrive("a", part)
    await files.check_room("b", 1500)
    for owner in ("b", "b", "b"):
        await files.arrive(owner, part)
    with pytest.raises(InvalidRequest, match="all tenants together"):
        await files.arrive("c", 1)
    files.arrived("a", 4 * part)
    await files.arrive("c", 1)
    await files.arrive("a", 4 * part - 1)
    await database.close()


async def test_files_that_have_expired_take_no_room_of_their_tenant(tmp_path: Path) -> None:
    database = open_jobs(tmp_path / "jobs")
    database.max_bytes = 4000
    files = Files(database)
    for name, keep_s in (("old", -1), ("new", 60)):
        upload = files.begin("a")
        await upload.add(b"x" * 1200)
        await files.done(upload, name, "batch", keep_s)
    await files.check_room("a", 800)
    with pytest.raises(InvalidRequest, match="2001 bytes would be stored"):
        await files.check_room("a", 801)
    await database.close()


async def test_a_batch_whose_lines_have_no_room_fails(tmp_path: Path) -> None:
    database = open_jobs(tmp_path / "jobs")
    async with served(cluster(), jobs=database) as api:
        file = await upload(api, [line(n) for n in range(9)])
        database.max_bytes = 3 * file["bytes"]
        batch = await ended(api, await create(api, file["id"]), "failed")
    (fault,) = batch["errors"]["data"]
    assert fault["code"] == "no_room"
    assert "would be stored" in fault["message"]


@pytest.mark.parametrize("given", ["\0", "\udcff", "a" * 10_000], ids=["nul", "half", "long"])
async def test_what_no_id_can_be_is_not_there(database: Database, given: str) -> None:
    with pytest.raises(ItemNotFound):
        await Files(database).get("a", given)
    with pytest.raises(ItemNotFound):
        await Files(database).delete("a", given)
    with pytest.raises(ItemNotFound):
        await Batches(database).get("a", given, "batch")


@pytest.mark.parametrize("is_whole", [True, False], ids=["file", "upload"])
async def test_bytes_are_deleted_chunk_by_chunk(
    database: Database, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To delete 200 MiB at once keeps a database from all others for seconds."""
    files, run, deleted = Files(database), database.run, []
    kept, upload = files.begin("a"), files.begin("a")
    for one in (kept, upload):
        await one.add(b"x" * (2 * CHUNK_BYTES + 17))
    await files.done(kept, "kept", "batch", 3600)
    if is_whole:
        await files.done(upload, "file", "batch", 3600)

    async def counted(*steps: Step, **how: Any) -> list[list[Row]]:
        deleted.append(sum(step[0] == tables.DROP_CHUNK for step in steps))
        return await run(*steps, **how)

    monkeypatch.setattr(database, "run", counted)
    await (files.delete("a", upload.file_id) if is_whole else upload.drop())
    assert (max(deleted), sum(deleted)) == (1, 3)
    ((left,),) = (await run(("SELECT count(*) FROM pdserve_chunks",)))[0]
    assert left == 3
    assert len([chunk async for chunk in files.read("a", kept.file_id)]) == 3
