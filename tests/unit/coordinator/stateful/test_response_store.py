"""What is kept of responses, and what goes first."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.api.responses.items import CallOutputItem
from coordinator.stateful.storage.store import ResponseStore
from coordinator.stateful.storage.stored import StoredConversation, StoredResponse, items_bytes
from pdserve.errors import ResponseNotFound


def made(name: str, num_bytes: int = 10, owner: str = "acme") -> StoredResponse:
    return StoredResponse(
        id=name, owner=owner, body=b"x" * num_bytes, items=(), num_input_items=0, items_bytes=0
    )


def has(store: ResponseStore, name: str, owner: str = "acme") -> bool:
    try:
        return store.get(name, owner).id == name
    except ResponseNotFound:
        return False


def test_bytes_are_bounded_and_the_least_recently_used_goes() -> None:
    store = ResponseStore(max_responses=10, max_bytes=30)
    for name in "abc":
        store.put(made(name))
    assert has(store, "a"), "which makes it the last to go"
    store.put(made("d", 15))
    assert [name for name in "abcd" if has(store, name)] == ["a", "d"]
    store.put(made("e", 31))
    assert [name for name in "abcde" if has(store, name)] == ["a", "d"]


def test_the_items_of_a_response_count_towards_the_limit() -> None:
    store = ResponseStore(max_responses=10, max_bytes=30)
    store.put(
        StoredResponse(id="a", owner="", body=b"x", items=(), num_input_items=0, items_bytes=30)
    )
    assert len(store) == 0


def test_a_conversation_that_was_emptied_weighs_nothing() -> None:
    talk = StoredConversation(id="conv_a", owner="acme", created_at=0, metadata={})
    empty_bytes = talk.num_bytes
    items = [CallOutputItem(id=f"fco_{i}", call_id="c", output="x" * i) for i in range(5)]
    talk.add(items, items_bytes(items))
    assert talk.num_bytes > empty_bytes
    for item in items:
        talk.remove(item.id)
    assert talk.num_bytes == empty_bytes


def test_another_owner_cannot_even_delete() -> None:
    store = ResponseStore(max_responses=10, max_bytes=100)
    store.put(made("a"))
    assert has(store, "a")
    assert not has(store, "a", "night")
    store.discard(store.get("a", "acme"))
    assert not has(store, "a")


def test_what_grows_is_counted_and_what_is_gone_stays_gone() -> None:
    store = ResponseStore(max_responses=10, max_bytes=30)
    first, second = made("a"), made("b")
    store.put(first)
    store.put(second)
    second.body = b"x" * 21
    store.changed(second)
    assert [name for name in "ab" if has(store, name)] == ["b"]
    store.changed(first)
    assert len(store) == 1
    second.body = b"x" * 31
    store.changed(second)
    assert len(store) == 0


@pytest.mark.parametrize("num_bytes", [1, 20])  # too many, too large
def test_a_flood_pushes_out_its_own(num_bytes: int) -> None:
    store = ResponseStore(max_responses=10, max_bytes=200)
    for i in range(3):
        store.put(made(f"mine {i}", num_bytes, "acme"))
    for i in range(50):
        store.put(made(f"flood {i}", num_bytes, "night"))
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
    store = ResponseStore(max_responses=4, max_bytes=60)
    held: dict[str, int] = {}  # as a plain model has it, in order of use
    for i, (kind, number, num_bytes) in enumerate(steps):
        name = f"{i}" if kind == "put" else (list(held) or ["-"])[number % max(len(held), 1)]
        if kind == "put":
            store.put(made(name, num_bytes))
            held[name] = num_bytes
            while len(held) > 4 or sum(held.values()) > 60:
                held.pop(next(iter(held)))
        elif kind == "get" and has(store, name):
            held[name] = held.pop(name)
        elif kind == "grow" and name in held:
            stored = store.get(name, "acme")
            stored.body = b"x" * num_bytes
            store.changed(stored)
            held.pop(name)
            held[name] = num_bytes
            while sum(held.values()) > 60:
                held.pop(next(iter(held)))
        elif kind == "delete" and name in held:
            store.discard(store.get(name, "acme"))
            del held[name]
        assert len(store) == len(held)
    assert all(has(store, name) for name in held)
