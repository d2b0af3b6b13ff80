"""The file of stored responses and conversations: what is said to be stored is in it."""

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from coordinator.api.responses.items import CallOutputItem
from coordinator.stateful.storage.opening import open_store
from coordinator.stateful.storage.order import Order
from coordinator.stateful.storage.packed_items import PackedItem, items_bytes, pack
from coordinator.stateful.storage.saved_entries import encoder_of
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.store_file import VERSION, StoreFile
from coordinator.stateful.storage.stored import StoredConversation, StoredResponse
from pdserve.shared.errors import ConfigError, ResponseNotFound, StoreUnavailable
from tests.full_disk import full_disk
from tests.unit.coordinator.stateful.test_response_store import has

(ITEM,) = pack([CallOutputItem(id="fco_1", call_id="call", output="42")])


def answered(name: str, text: str = "an answer") -> StoredResponse:
    body = msgspec.json.encode({"id": name, "status": "completed", "text": text})
    return StoredResponse(
        id=name,
        owner="acme",
        body=body,
        items=(ITEM,),
        num_input_items=1,
        items_bytes=items_bytes([ITEM]),
        is_answer=True,
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "store.sqlite"


def reopened(path: Path, **limits: int) -> ResponseStore:
    return ResponseStore(backing=StoreFile(path), **limits)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def copied(path: Path) -> Path:
    """Copy the file, and the log of its last transactions."""
    copy = path.with_name("copy.sqlite")
    for suffix in ("", "-wal"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{path}{suffix}").read_bytes())
    return copy


@pytest.mark.parametrize("version", [0, 1, VERSION])
async def test_a_full_disk_keeps_no_coordinator_from_starting(path: Path, version: int) -> None:
    """What is there can be read, and what is to be stored is refused until there is room."""
    is_new = version == 0
    if not is_new:
        before = reopened(path)
        before.put(answered("resp_a"))
        await before.close()
    if version == 1:
        as_of_the_version_before(path)
    with full_disk():
        store = reopened(path)
        if not is_new:
            assert store.get("resp_a", "acme") == answered("resp_a")
        store.put(answered("resp_b"))
        with pytest.raises(StoreUnavailable):
            await store.saved()
    store.put(answered("resp_c"))
    await store.saved()
    await store.close()
    again = reopened(path)
    assert all(has(again, name) for name in ("resp_b", "resp_c", *([] if is_new else ["resp_a"])))
    await again.close()


async def test_what_was_stored_is_there_again(path: Path) -> None:
    store = reopened(path)
    talk = StoredConversation(id="conv_a", owner="acme", created_at=7, metadata={"a": "b"})
    talk.add([ITEM])
    store.put(talk)
    store.put(answered("resp_a"))
    store.put(answered("resp_b"))
    store.discard(store.get("resp_b", "acme"))
    await store.close()

    again = reopened(path)
    assert again.get("resp_a", "acme") == answered("resp_a")
    found = again.get_conversation("conv_a", "acme")
    assert (found.metadata, found.items, found.num_bytes) == ({"a": "b"}, [ITEM], talk.num_bytes)
    assert not has(again, "resp_b")
    with pytest.raises(ResponseNotFound):
        again.get("resp_a", "night")
    await again.close()
    assert mode_of(path) == 0o600, "others have no business in it"


async def test_what_is_saved_outlives_a_coordinator_that_is_killed(path: Path) -> None:
    """Read by another connection while the first has the file open, as after kill -9."""
    store = reopened(path)
    store.put(answered("resp_a"))
    await store.saved()
    survivor = reopened(copied(path))
    assert has(survivor, "resp_a")
    await survivor.close()
    await store.close()


async def test_what_is_evicted_is_not_in_the_file_either(path: Path) -> None:
    store = reopened(path, max_responses=2)
    for name in ("resp_a", "resp_b", "resp_c"):
        store.put(answered(name))
    await store.close()
    again = reopened(path, max_responses=2)
    assert [has(again, f"resp_{name}") for name in "abc"] == [False, True, True]
    await again.close()


async def test_a_smaller_store_takes_what_was_used_last(path: Path) -> None:
    store = reopened(path)
    for name in ("resp_a", "resp_b", "resp_c"):
        store.put(answered(name))
    await store.close()
    smaller = reopened(path, max_responses=1)
    assert [has(smaller, f"resp_{name}") for name in "abc"] == [False, False, True]
    await smaller.close()


async def test_what_was_not_finished_keeps_its_order(path: Path) -> None:
    store = reopened(path)
    order = Order(
        body=b'{"input":"hello"}',
        headers={"X-SLO-Class": "batch"},
        unique="1",
        request_id="r",
        address="",
        key_id="k",
        digest=b"d",
        created_at=7,
        is_streamed=True,
    )
    running, done = answered("resp_a"), answered("resp_b")
    running.is_answer, running.order, done.order = False, order, order
    store.put(running)
    store.put(done)
    order.num_runs += 1
    await store.close()
    again = reopened(path)
    (found,) = again.unfinished()
    assert (found.id, found.order) == ("resp_a", replace(order, num_runs=1)), "as it was then"
    assert found.log is not None, "it can be followed at once"
    await again.close()


async def test_a_write_that_fails_is_told_and_made_up_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the disk is full for a while."""
    file = StoreFile(path)
    store = ResponseStore(backing=file)

    def fail(batch: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as full:
        full.setattr(file, "_write_now", fail)
        store.put(answered("resp_a"))
        with pytest.raises(StoreUnavailable, match="cannot be written now"):
            await store.saved()
    assert has(store, "resp_a"), "it is still in memory"
    store.put(answered("resp_b"))
    await store.saved()
    await store.close()
    again = reopened(path)
    assert has(again, "resp_a")
    assert has(again, "resp_b")
    await again.close()


async def test_two_coordinators_cannot_have_one_file(path: Path) -> None:
    store = reopened(path)
    with pytest.raises(ConfigError, match=r"another coordinator has it, .*name another file"):
        StoreFile(path, busy_s=0.05)
    await store.close()


async def test_files_of_newer_versions_and_of_others_are_refused(path: Path) -> None:
    await reopened(path).close()
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA user_version = {VERSION + 1}")
    database.close()
    with pytest.raises(ConfigError, match="written by a newer pdserve"):
        StoreFile(path)
    other = path.with_name("notes.txt")
    other.write_text("not a database, and long enough to be seen as none" * 30)
    with pytest.raises(ConfigError, match="cannot keep stored responses in"):
        StoreFile(other)


async def test_the_setting_names_a_file_or_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for store, port, file in (
        ("memory", 8000, None),
        ("", 0, None),
        ("", 8000, tmp_path / "pdserve/responses/org_model-8000.sqlite"),
        (str(tmp_path / "mine.sqlite"), 0, tmp_path / "mine.sqlite"),
    ):
        await open_store(store, "org/model", port).close()
        assert file is None or file.exists()


def rows_of(path: Path) -> list[tuple[int, bytes]]:
    with closing(sqlite3.connect(copied(path))) as database:
        return database.execute("SELECT seq, item FROM items ORDER BY seq").fetchall()


async def test_a_word_more_is_a_row_more(path: Path) -> None:
    talk = StoredConversation(id="conv_a", owner="acme", created_at=7, metadata={})
    talk.add(items_said(0, 500))
    store = reopened(path)
    store.put(talk)
    await store.saved()
    before = rows_of(path)
    store.change(talk, lambda c: c.add(items_said(500, 501)))
    store.change(talk, lambda c: c.remove("fco_7"))
    await store.saved()
    after = rows_of(path)
    assert after[:-1] == [row for row in before if row[0] != 8]
    assert len(after) == len(before) == 500
    with closing(sqlite3.connect(copied(path))) as database:
        assert database.execute("SELECT max(length(entry)) FROM entries").fetchone()[0] < 200
    await store.close()
    again = reopened(path)
    assert again.get_conversation("conv_a", "acme") == talk
    again.discard(again.get_conversation("conv_a", "acme"))
    await again.saved()
    assert rows_of(path) == []
    await again.close()


async def test_a_conversation_of_the_version_before_goes_on(path: Path) -> None:
    talk = StoredConversation(id="conv_a", owner="acme", created_at=7, metadata={})
    talk.add(items_said(0, 3))
    await reopened(path).close()
    entry = ("acme", "conv_a", encoder_of(talk)())
    as_of_the_version_before(path, "INSERT INTO entries (owner, id, entry) VALUES (?, ?, ?)", entry)
    for number in (3, 4):
        store = reopened(path)
        found = store.get_conversation("conv_a", "acme")
        store.change(found, lambda c, n=number: c.add(items_said(n, n + 1)))
        await store.close()
    store = reopened(path)
    assert store.get_conversation("conv_a", "acme").items == items_said(0, 5)
    await store.close()


async def test_a_file_is_of_the_new_version_all_at_once(path: Path) -> None:
    """A coordinator that ends, or has no room, in the middle leaves the version before."""
    await reopened(path).close()
    as_of_the_version_before(path, "CREATE INDEX items_of ON entries (id)")  # in the way of ours
    for _ in range(2):
        with pytest.raises(ConfigError, match="index items_of already exists"):
            StoreFile(path)
    with closing(sqlite3.connect(path)) as database:
        database.execute("DROP INDEX items_of")
    await reopened(path).close()


def as_of_the_version_before(path: Path, and_then: str = "", *given: tuple[object, ...]) -> None:
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("DROP TABLE items")
        database.execute("PRAGMA user_version = 1")
        database.execute(and_then, *given)


def items_said(first: int, end: int) -> list[PackedItem]:
    return pack(CallOutputItem(id=f"fco_{i}", call_id="c", output="x") for i in range(first, end))
