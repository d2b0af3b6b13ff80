"""What is kept of responses, and what goes first."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.responses.items import CallItem, CallOutputItem
from coordinator.stateful.storage.packed_items import pack
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import EventLog, StoredConversation, StoredResponse
from pdserve.shared.errors import ResponseNotFound


def contents(num_units: int) -> bytes:
    return bytes(num_units * UNIT)


def made(name: str, num_units: int = 10, owner: str = "acme") -> StoredResponse:
    return StoredResponse(
        id=name, owner=owner, body=contents(num_units), items=(), num_input_items=0, items_bytes=0
    )


UNIT = (
    32
    * StoredResponse(
        id="", owner="", body=b"", items=(), num_input_items=0, items_bytes=0
    ).num_bytes
)  # beside which what an entry takes by itself is little


def sized(num_units: int, max_responses: int = 10) -> ResponseStore:
    """A store for so many units of contents."""
    return ResponseStore(max_responses, num_units * UNIT + UNIT // 2)


def has(store: ResponseStore, name: str, owner: str = "acme") -> bool:
    try:
        return store.get(name, owner).id == name
    except ResponseNotFound:
        return False


def test_bytes_are_bounded_and_the_least_recently_used_goes() -> None:
    store = sized(30)
    for name in "abc":
        store.put(made(name))
    assert has(store, "a"), "which makes it the last to go"
    store.put(made("d", 15))
    assert [name for name in "abcd" if has(store, name)] == ["a", "d"]
    store.put(made("e", 31))
    assert [name for name in "abcde" if has(store, name)] == ["a", "d"]


def test_the_items_of_a_response_count_towards_the_limit() -> None:
    store = sized(30)
    store.put(
        StoredResponse(
            id="a", owner="", body=b"x", items=(), num_input_items=0, items_bytes=31 * UNIT
        )
    )
    assert len(store) == 0


def test_a_conversation_that_was_emptied_weighs_nothing() -> None:
    talk = StoredConversation(id="conv_a", owner="acme", created_at=0, metadata={})
    empty_bytes = talk.num_bytes
    talk.add(pack(CallOutputItem(id=f"fco_{i}", call_id="c", output="x" * i) for i in range(5)))
    assert talk.num_bytes > empty_bytes
    for item in [*talk.items]:
        talk.remove(item.id)
    assert talk.num_bytes == empty_bytes


def test_another_owner_cannot_even_delete() -> None:
    store = sized(100)
    store.put(made("a"))
    assert has(store, "a")
    assert not has(store, "a", "night")
    store.discard(store.get("a", "acme"))
    assert not has(store, "a")


def test_what_grows_is_counted_and_what_is_gone_stays_gone() -> None:
    store = sized(30)
    first, second = made("a"), made("b")
    store.put(first)
    store.put(second)
    second.body = contents(21)
    store.changed(second)
    assert [name for name in "ab" if has(store, name)] == ["b"]
    store.changed(first)
    assert len(store) == 1
    second.body = contents(31)
    store.changed(second)
    assert len(store) == 0


@pytest.mark.parametrize("num_units", [1, 20])  # too many, too large
def test_a_flood_pushes_out_its_own(num_units: int) -> None:
    store = sized(200)
    for i in range(3):
        store.put(made(f"mine {i}", num_units, "acme"))
    for i in range(50):
        store.put(made(f"flood {i}", num_units, "night"))
    assert [i for i in range(3) if has(store, f"mine {i}")] == [0, 1, 2]
    assert [i for i in range(50) if has(store, f"flood {i}", "night")] == list(range(43, 50))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "grow", "delete"]), st.integers(0, 9), st.integers(0, 40)
        ),
        max_size=60,
    )
)
def test_it_never_holds_more_than_it_may(steps: list[tuple[str, int, int]]) -> None:
    store = sized(60, max_responses=4)
    held: dict[str, int] = {}  # as a plain model has it, in order of use
    for i, (kind, number, num_units) in enumerate(steps):
        name = f"{i}" if kind == "put" else (list(held) or ["-"])[number % max(len(held), 1)]
        if kind == "put":
            store.put(made(name, num_units))
            held[name] = num_units
            while len(held) > 4 or sum(held.values()) > 60:
                held.pop(next(iter(held)))
        elif kind == "get" and has(store, name):
            held[name] = held.pop(name)
        elif kind == "grow" and name in held:
            stored = store.get(name, "acme")
            stored.body = contents(num_units)
            store.changed(stored)
            held.pop(name)
            held[name] = num_units
            while sum(held.values()) > 60:
                held.pop(next(iter(held)))
        elif kind == "delete" and name in held:
            store.discard(store.get(name, "acme"))
            del held[name]
        assert len(store) == len(held)
    assert all(has(store, name) for name in held)


def test_all_that_an_entry_takes_is_counted() -> None:
    """As Python counts what it has given out: of entries that are as good as empty, of items of
    few characters and of many, of wide ones, and of the events of a stream."""
    tracemalloc.start()
    try:
        store = ResponseStore()
        before = tracemalloc.get_traced_memory()[0]
        for number in range(400):
            talk = StoredConversation(id=f"conv_{number}", owner="a", created_at=0, metadata={})
            texts = ["x" * (number % 7), "\N{GRINNING FACE}" + "y" * number]
            talk.add(pack(CallItem(id=f"fc_{t}", call_id=t, name=t, arguments=t) for t in texts))
            log = EventLog()
            log.add([b"x" * (number % 11) for _ in range(number % 50)])
            store.put(talk)
            store.put(
                StoredResponse(
                    id=f"resp_{number}",
                    owner=f"owner {number % 9}",
                    body=bytes(number),
                    items=tuple(talk.items),
                    num_input_items=1,
                    items_bytes=talk.items_bytes,
                    log=log,
                )
            )
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert taken <= store.num_bytes <= 4 * taken
