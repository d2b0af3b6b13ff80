"""Issuing tickets, greeting pullers, starting and stopping."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.ticket import read_ticket
from pdserve.clock import ManualClock
from pdserve.errors import LayoutMismatch, StaleIncarnation, TicketInvalid
from pdserve.kv_layout import KvDtype, KvLayout
from pdserve.protocol import PullerHello
from tests.unit.kv_transfer.pairs import SMALL, make_exporter, make_pool

IDENTITY = KvIdentity("a-model", "main", SMALL)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """Not started."""
    pool = make_pool(SMALL, 8)
    yield make_exporter(pool, SMALL)[0]
    pool.close()


def hello(identity: KvIdentity = IDENTITY, exporter_incarnation: str = "life-1") -> PullerHello:
    return PullerHello(
        node_id="d0",
        incarnation="x",
        exporter_incarnation=exporter_incarnation,
        fingerprint=identity.fingerprint,
        layout=identity.layout,
    )


def test_a_ticket_holds_the_present_generations(exporter: Exporter) -> None:
    exporter.pool.bump([3])
    exporter.pool.bump([3, 5])
    ticket = read_ticket(exporter.issue("r", 6, 7, [3, 5, 0]))
    assert (ticket.block_ids, ticket.generations) == ([3, 5, 0], [2, 1, 0])
    assert (ticket.first_token, ticket.num_tokens, ticket.request_id) == (6, 7, "r")
    assert exporter.statistics.tickets_issued == 1


def test_a_ticket_expires_when_asked(exporter: Exporter) -> None:
    pool = make_pool(SMALL, 8)
    exporter, clock = make_exporter(pool, SMALL)
    sealed = exporter.issue("r", 0, 4, [1], lifetime_s=5.0)
    exporter.open_ticket(sealed)
    clock.advance(5.5)
    with pytest.raises(TicketInvalid, match="expired"):
        exporter.open_ticket(sealed)
    pool.close()


@pytest.mark.parametrize(
    ("first_token", "num_tokens", "block_ids"),
    [
        (0, 0, []),
        (-1, 4, [1]),
        (0, 4, [1, 2]),
        (3, 2, [1]),
        (0, 5, [1]),
        (0, 4, [8]),
        (0, 4, [-1]),
    ],
)
def test_blocks_must_fit_the_tokens_and_the_pool(
    exporter: Exporter, first_token: int, num_tokens: int, block_ids: list[int]
) -> None:
    with pytest.raises(ValueError, match=r"blocks|block ids"):
        exporter.issue("r", first_token, num_tokens, block_ids)


def test_a_hello_that_fits(exporter: Exporter) -> None:
    exporter.check_hello(hello())
    exporter.check_hello(
        hello(KvIdentity("a-model", "main", KvLayout(2, 2, 8, 16, KvDtype.FLOAT32)))
    )
    assert exporter.statistics.refused == 0


def test_a_hello_to_a_former_life_is_refused_with_both(exporter: Exporter) -> None:
    with pytest.raises(StaleIncarnation, match=r"'life-0'.*'life-1'"):
        exporter.check_hello(hello(exporter_incarnation="life-0"))
    assert exporter.statistics.refused == 1


@pytest.mark.parametrize(
    "identity",
    [
        KvIdentity("another-model", "main", SMALL),
        KvIdentity("a-model", "next", SMALL),
        KvIdentity("a-model", "main", KvLayout(2, 4, 8, 4, KvDtype.FLOAT32)),
    ],
)
def test_a_hello_with_other_kv_is_refused_with_both(
    exporter: Exporter, identity: KvIdentity
) -> None:
    with pytest.raises(LayoutMismatch) as caught:
        exporter.check_hello(hello(identity))
    assert SMALL.describe() in str(caught.value)
    assert identity.layout.describe() in str(caught.value)


def test_a_pool_must_have_the_layouts_blocks() -> None:
    pool = make_pool(SMALL, 2)
    other = KvIdentity("a-model", "main", KvLayout(2, 2, 8, 8, KvDtype.FLOAT32))
    with pytest.raises(ValueError, match="blocks of 1024 bytes, the layout of 2048"):
        Exporter("p0", "life-1", other, pool, ManualClock())
    with pytest.raises(ValueError, match="blocks of 1024 bytes, the layout of 2048"):
        Puller(pool, other, host_id())
    pool.close()


async def test_offers_exist_while_it_is_started() -> None:
    pool = make_pool(SMALL, 8)
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock())
    await exporter.start("127.0.0.1", advertised_host="node-7")
    welcome = exporter.welcome()
    assert [offer.name for offer in welcome.offers] == ["shm", "tcp"]
    assert welcome.offers[1].endpoint.startswith("node-7:")
    assert (welcome.num_blocks, welcome.host_id) == (8, host_id())
    await exporter.close()
    assert exporter.offers == []
    assert len(welcome.offers) == 2
    pool.close()


async def test_an_address_that_is_not_ours_is_an_error_and_leaves_nothing_running() -> None:
    pool = make_pool(SMALL, 8)
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock())
    with pytest.raises(OSError, match=r"assign|resolution|known"):
        await exporter.start("192.0.2.1")
    assert exporter.offers == []
    pool.close()


async def test_ipv6() -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    pool = make_pool(SMALL, 8, seed=1)
    exporter, _ = make_exporter(pool, SMALL)
    try:
        await exporter.start("::1")
    except OSError:
        pool.close()
        pytest.skip("no IPv6 loopback here")
    destination = make_pool(SMALL, 8)
    puller = Puller(destination, IDENTITY, host_id())
    link = await puller.connect(exporter.welcome(), timeout_s=5)
    await puller.pull(link, exporter.issue("r", 0, 4, [3]), [5], 0, timeout_s=5)
    assert (destination.data[5] == pool.data[3]).all()
    await link.close()
    puller.close()
    await exporter.close()
    destination.close()
    pool.close()


def test_a_welcome_survives_the_wire(exporter: Exporter) -> None:
    welcome = exporter.welcome()
    encoded = msgspec.msgpack.encode(welcome)
    assert msgspec.msgpack.decode(encoded, type=type(welcome)) == welcome
