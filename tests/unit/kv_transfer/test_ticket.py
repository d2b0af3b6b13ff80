"""Tickets: what is sealed opens, and nothing else does."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kv_transfer.ticket import (
    MAC_BYTES,
    MAX_TICKET_BYTES,
    Ticket,
    TicketSealer,
    max_blocks,
    read_ticket,
)
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import StaleIncarnation, TicketInvalid
from tests.matrix import examples
from tests.unit.kv_transfer.pairs import SMALL

TICKET = Ticket(
    version=3,
    node_id="p0",
    incarnation="life-1",
    request_id="r",
    fingerprint="f",
    first_token=6,
    num_tokens=7,
    block_ids=[9, 2, 5],
    generations=[0, 3, (1 << 64) - 1],
    first_layer=0,
    end_layer=2,
    checksums=b"",
    expires_at_s=110.0,
)


WITH_CHECKSUMS = msgspec.structs.replace(TICKET, checksums=bytes(range(48)))
LAYOUT = SMALL  # 2 layers, 2 KV heads, 4 tokens a block


def make_sealer(incarnation: str = "life-1", now_s: float = 100.0) -> TicketSealer:
    return TicketSealer(incarnation, ManualClock(now_s))


SEALER = make_sealer()
SEALED = SEALER.seal(TICKET)


def test_what_was_sealed_opens() -> None:
    assert SEALER.open(SEALED) == TICKET
    assert read_ticket(SEALED) == TICKET
    assert SEALER.open(SEALER.seal(WITH_CHECKSUMS)).sums == bytes(range(48))


def test_checksums_of_earlier_builds_are_others() -> None:
    earlier = msgspec.structs.replace(TICKET, version=2, checksums=[1, 2, 3, 4, 5, (1 << 64) - 1])
    opened = SEALER.open(SEALER.seal(earlier))
    assert opened == earlier
    assert opened.sums == b""
    opened.check(10, LAYOUT)


@pytest.mark.parametrize("num_checksums", [0, 1, 32, 4096])
def test_the_largest_ticket_opens_whatever_its_numbers_are(num_checksums: int) -> None:
    num_blocks, most, name = max_blocks(num_checksums), (1 << 64) - 1, "\U0010ffff" * 256
    ticket = msgspec.structs.replace(
        TICKET,
        node_id=name,
        incarnation=name,
        request_id=name,
        fingerprint=name,
        first_token=1 << 40,
        num_tokens=1 << 40,
        block_ids=[(1 << 40) - 1] * num_blocks,
        generations=[most] * num_blocks,
        first_layer=1 << 40,
        end_layer=1 << 40,
        checksums=bytes(8 * num_blocks * num_checksums),
    )
    sealer = make_sealer(name)
    assert sealer.open(sealer.seal(ticket)) == ticket
    with pytest.raises(ValueError, match="more than 2097152"):
        sealer.seal(msgspec.structs.replace(ticket, checksums=bytes(MAX_TICKET_BYTES)))


@given(st.integers(0, len(SEALED) * 8 - 1))
def test_one_flipped_bit_is_refused(bit: int) -> None:
    garbled = bytearray(SEALED)
    garbled[bit // 8] ^= 1 << bit % 8
    with pytest.raises((TicketInvalid, StaleIncarnation)):
        SEALER.open(bytes(garbled))


@given(st.integers(0, len(SEALED) - 1))
def test_a_truncated_ticket_is_refused(length: int) -> None:
    with pytest.raises(TicketInvalid):
        SEALER.open(SEALED[:length])


@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(TicketInvalid):
        SEALER.open(garbage)
    with pytest.raises(TicketInvalid):
        SEALER.open(SEALED + garbage + b"x")


@pytest.mark.parametrize("head", [b"\x91", b"\x81", b"\x9d\x02\xd9\xff", b"\x9d\x02\xa1\xff"])
def test_deep_and_ill_encoded_garbage_is_refused(head: bytes) -> None:
    with pytest.raises(TicketInvalid):
        read_ticket(head * 50_000)


@settings(max_examples=examples(50))
@given(st.recursive(st.none() | st.integers(-5, 1 << 63) | st.text(max_size=4), st.lists))
def test_well_formed_msgpack_that_is_no_ticket_is_refused(content: object) -> None:
    with pytest.raises(TicketInvalid):
        read_ticket(msgspec.msgpack.encode(content) + bytes(MAC_BYTES))


def test_another_process_of_the_same_name_cannot_open_it() -> None:
    with pytest.raises(TicketInvalid, match="seal"):
        make_sealer().open(SEALED)


def test_a_ticket_of_a_former_life_says_so() -> None:
    with pytest.raises(StaleIncarnation, match=r"'life-1'.*'life-2'"):
        make_sealer("life-2").open(SEALED)


def test_an_expired_ticket_is_refused() -> None:
    clock = ManualClock(100.0)
    sealer = TicketSealer("life-1", clock)
    sealed = sealer.seal(TICKET)
    clock.advance(10.0)
    sealer.open(sealed)
    clock.advance(0.5)
    with pytest.raises(TicketInvalid, match=r"expired 0\.5 s ago"):
        sealer.open(sealed)


def test_an_oversized_ticket_is_refused_unread() -> None:
    with pytest.raises(TicketInvalid, match="bytes"):
        read_ticket(bytes(MAX_TICKET_BYTES + 1))
    huge = msgspec.structs.replace(TICKET, block_ids=[1 << 30] * 500_000)
    with pytest.raises(ValueError, match="500000 blocks"):
        SEALER.seal(huge)


def test_a_ticket_fits_its_own_pool() -> None:
    TICKET.check(num_blocks=10, layout=LAYOUT)  # tokens 6..13 in blocks 1, 2 and 3
    WITH_CHECKSUMS.check(num_blocks=10, layout=LAYOUT)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "changes"),
    [
        (9, 4, {}),  # block 9 of 9
        (10, 8, {}),  # tokens 6..13 in two blocks
        (10, 4, {"num_tokens": 0}),
        (10, 4, {"generations": [0, 3]}),
        (10, 4, {"first_token": 1 << 40}),
        (10, 4, {"first_layer": 2}),
        (10, 4, {"end_layer": 3}),
        (10, 4, {"checksums": bytes(5 * 8)}),
    ],
)
def test_a_ticket_that_does_not_fit_is_refused(
    num_blocks: int, block_size: int, changes: dict[str, object]
) -> None:
    ticket = msgspec.structs.replace(TICKET, **changes)
    layout = msgspec.structs.replace(LAYOUT, block_size=block_size)
    with pytest.raises(TicketInvalid):
        ticket.check(num_blocks, layout)


@pytest.mark.parametrize(
    ("begin", "end", "block_ids", "generations"),
    [(6, 13, [9, 2, 5], [0, 3, (1 << 64) - 1]), (8, 12, [2], [3]), (7, 9, [9, 2], [0, 3])],
)
def test_blocks_between(begin: int, end: int, block_ids: list[int], generations: list[int]) -> None:
    found_ids, found_generations = TICKET.blocks_between(begin, end, block_size=4)
    assert found_ids.tolist() == block_ids
    assert found_generations.tolist() == generations
