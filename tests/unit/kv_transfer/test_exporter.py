"""Issuing tickets, greeting pullers, starting and stopping."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import msgspec
import pytest

from kv_transfer.exporter import Exporter, TicketRules
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.puller import Puller
from kv_transfer.threads import CancelFlag
from kv_transfer.ticket import read_ticket
from kv_transfer.transports.catalog import TransportKind, choose_kinds
from kv_transfer.transports.shm import ShmTransport
from kv_transfer.transports.tcp import TcpTransport
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import PullerHello, TransportOffer, TransportReach
from pdserve.protocol.version import PROTOCOL
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import (
    AccessDenied,
    ConfigError,
    LayoutMismatch,
    StaleIncarnation,
    TicketInvalid,
)
from pdserve.shared.introduction import introduce
from tests.unit.kv_transfer.pairs import SMALL, make_exporter, make_pool

IDENTITY = KvIdentity("a-model", "main", SMALL)


@pytest.fixture
def exporter() -> Iterator[Exporter]:
    """Not started."""
    pool = make_pool(SMALL, 8)
    yield make_exporter(pool, SMALL)[0]
    pool.close()


def hello(
    exporter: Exporter, identity: KvIdentity = IDENTITY, exporter_incarnation: str = "life-1"
) -> PullerHello:
    """Of a puller that a coordinator has introduced."""
    return PullerHello(
        node_id="d0",
        incarnation="x",
        exporter_incarnation=exporter_incarnation,
        fingerprint=identity.fingerprint,
        layout=identity.layout,
        introduction=introduce(exporter.introduction_key, exporter.incarnation, "x"),
        protocol=PROTOCOL,
    )


def test_a_ticket_holds_the_present_generations(exporter: Exporter) -> None:
    exporter.pool.bump([3])
    exporter.pool.bump([3, 5])
    ticket = read_ticket(exporter.issue("r", 6, 7, [3, 5, 0]))
    assert (ticket.block_ids, ticket.generations) == ([3, 5, 0], [2, 1, 0])
    assert (ticket.first_token, ticket.num_tokens, ticket.request_id) == (6, 7, "r")
    assert exporter.statistics.tickets_issued == 1


def test_a_ticket_expires_after_its_lifetime() -> None:
    pool = make_pool(SMALL, 8)
    clock = ManualClock(100.0)
    exporter = Exporter("p0", "life-1", IDENTITY, pool, clock, tickets=TicketRules(5.0))
    sealed = exporter.issue("r", 0, 4, [1])
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
    exporter.check_hello(hello(exporter))
    exporter.check_hello(
        hello(exporter, KvIdentity("a-model", "main", KvLayout(2, 2, 8, 16, KvDtype.FLOAT32)))
    )
    assert exporter.statistics.refused == 0


@pytest.mark.parametrize("distance", [-1, 0, 1])
def test_a_hello_of_a_build_near_ours(exporter: Exporter, distance: int) -> None:
    exporter.check_hello(msgspec.structs.replace(hello(exporter), protocol=PROTOCOL + distance))


def test_a_hello_of_another_age_is_refused(exporter: Exporter) -> None:
    with pytest.raises(ConfigError, match="d0 speaks protocol"):
        exporter.check_hello(msgspec.structs.replace(hello(exporter), protocol=PROTOCOL + 2))
    assert exporter.statistics.refused == 1


def test_a_hello_to_a_former_life_is_refused_with_both(exporter: Exporter) -> None:
    with pytest.raises(StaleIncarnation, match=r"'life-0'.*'life-1'"):
        exporter.check_hello(hello(exporter, exporter_incarnation="life-0"))
    assert exporter.statistics.refused == 1


@pytest.mark.parametrize(
    "introduction",
    [
        b"",
        bytes(32),
        introduce(bytes(32), "life-1", "x"),
        introduce(b"", "life-1", "x"),
    ],
    ids=["none", "zeros", "with another key", "with no key"],
)
def test_a_hello_of_nobody_we_know_is_refused(exporter: Exporter, introduction: bytes) -> None:
    with pytest.raises(AccessDenied, match="'p0' sent 'd0'"):
        exporter.check_hello(msgspec.structs.replace(hello(exporter), introduction=introduction))
    assert exporter.statistics.refused == 1


def test_an_introduction_is_good_for_one_life_of_each(exporter: Exporter) -> None:
    key = exporter.introduction_key
    for introduction in (introduce(key, "life-0", "x"), introduce(key, "life-1", "y")):
        with pytest.raises(AccessDenied):
            exporter.check_hello(
                msgspec.structs.replace(hello(exporter), introduction=introduction)
            )
    shifted = msgspec.structs.replace(hello(exporter), introduction=introduce(key, "life", "-1x"))
    with pytest.raises(AccessDenied):
        exporter.check_hello(shifted)


@pytest.mark.parametrize("layers", [range(1, 1), range(2, 1), range(-1, 1), range(0, 3)])
def test_layers_that_the_pool_does_not_have(exporter: Exporter, layers: range) -> None:
    with pytest.raises(ValueError, match="layers"):
        exporter.issue("r", 0, 4, [1], layers)


def test_a_ticket_for_some_layers(exporter: Exporter) -> None:
    ticket = exporter.open_ticket(exporter.issue("r", 0, 4, [1], range(1, 2)))
    assert (ticket.first_layer, ticket.end_layer) == (1, 2)


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
        exporter.check_hello(hello(exporter, identity))
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


async def test_it_listens_on_the_ports_that_it_is_given() -> None:
    pool = make_pool(SMALL, 8)
    kinds = choose_kinds(["shm", "tcp"], pool)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        taken = Exporter("p0", "life-1", IDENTITY, pool, ManualClock(), kinds)
        with pytest.raises(OSError, match="in use"):
            await taken.start("127.0.0.1", port=port)
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock(), kinds)
    await exporter.start("127.0.0.1", "fd00::7", port)
    assert exporter.welcome().offers[1].endpoint == f"[fd00::7]:{port}"
    await exporter.close()
    pool.close()


async def test_offers_exist_while_it_is_started() -> None:
    pool = make_pool(SMALL, 8)
    kinds = choose_kinds(["shm", "tcp"], pool)
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock(), kinds)
    await exporter.start("127.0.0.1", advertised_host="node-7")
    welcome = exporter.welcome()
    assert [offer.name for offer in welcome.offers] == ["shm", "tcp"]
    assert welcome.offers[1].endpoint.startswith("node-7:")
    assert exporter.reaches == [
        TransportReach(name="shm", domain=host_id()),
        TransportReach(name="tcp"),
    ]
    assert (welcome.num_blocks, welcome.host_id) == (8, host_id())
    await exporter.close()
    assert exporter.offers == []
    assert len(welcome.offers) == 2
    pool.close()


async def test_an_address_that_is_not_ours_is_an_error_and_leaves_nothing_running() -> None:
    pool = make_pool(SMALL, 8)
    kinds = choose_kinds(["shm", "tcp"], pool)
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock(), kinds)
    with pytest.raises(OSError, match=r"assign|resolution|known"):
        await exporter.start("192.0.2.1")
    assert exporter.offers == []
    pool.close()


class Server:
    """Hangs when it is started, or fails when it is closed."""

    def __init__(self, *, hangs: bool = False, error: Exception | None = None) -> None:
        self._hangs = hangs
        self._error = error
        self.num_closes = 0

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        if self._hangs:
            await asyncio.Event().wait()
        return TransportOffer(name="s")

    async def close(self) -> None:
        self.num_closes += 1
        if self._error is not None:
            raise self._error


def exporter_with(pool: ExportedPool, *servers: Server) -> Exporter:
    def kind_of(server: Server) -> TransportKind:
        return TransportKind("s", lambda _: server, ShmTransport, frozenset({"cpu"}))

    kinds = [kind_of(server) for server in servers]
    return Exporter("p0", "life-1", IDENTITY, pool, ManualClock(), kinds)


async def test_a_server_that_cannot_close_leaves_none_of_the_others_open() -> None:
    pool = make_pool(SMALL, 8)
    servers = [Server(), Server(error=RuntimeError("stuck")), Server()]
    exporter = exporter_with(pool, *servers)
    await exporter.start("127.0.0.1")
    with pytest.raises(RuntimeError, match="stuck"):
        await exporter.close()
    await exporter.close()
    assert [server.num_closes for server in servers] == [1, 1, 1]
    pool.close()


async def test_a_start_that_is_cancelled_leaves_nothing_running() -> None:
    pool = make_pool(SMALL, 8)
    servers = [Server(), Server(hangs=True)]
    exporter = exporter_with(pool, *servers)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await exporter.start("127.0.0.1")
    assert [server.num_closes for server in servers] == [1, 1]
    assert exporter.offers == []
    pool.close()


async def test_a_transport_that_cannot_close_leaves_neither_others_nor_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []

    async def close(self: TcpTransport | ShmTransport) -> None:
        closed.append(self.name)
        raise RuntimeError("stuck")

    monkeypatch.setattr(TcpTransport, "close", close)
    monkeypatch.setattr(ShmTransport, "close", close)
    pool = make_pool(SMALL, 8)
    puller = Puller(pool, IDENTITY, host_id(), choose_kinds(["shm", "tcp"], pool))
    with pytest.raises(RuntimeError, match="stuck"):
        await puller.close()
    assert sorted(closed) == ["shm", "tcp"]
    with pytest.raises(RuntimeError, match="after shutdown"):
        await puller._threads.run(lambda: None, CancelFlag())
    pool.close()


async def test_blocks_are_pulled_over_ipv6() -> None:
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
    link = await puller.connect(exporter.welcome(), timeout_s=30)
    await puller.pull(link, exporter.issue("r", 0, 4, [3]), [5], 0, timeout_s=30)
    assert (destination.data[5] == pool.data[3]).all()
    await link.close()
    await puller.close()
    await exporter.close()
    destination.close()
    pool.close()


def test_a_welcome_survives_the_wire(exporter: Exporter) -> None:
    welcome = exporter.welcome()
    encoded = msgspec.msgpack.encode(welcome)
    assert msgspec.msgpack.decode(encoded, type=type(welcome)) == welcome
