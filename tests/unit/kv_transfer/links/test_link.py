"""Which transport a link takes, why, and what happens when there is none."""

from __future__ import annotations

import asyncio
import logging
import resource
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.transports.catalog import choose_kinds
from pdserve.kv import KvDtype, KvLayout
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import LayoutMismatch, PeerLost, TransferTimeout
from tests.unit.kv_transfer.pairs import SMALL, make_pool


@pytest.fixture
async def exporter() -> AsyncIterator[Exporter]:
    """Offers shared memory and TCP."""
    pool = make_pool(SMALL, 8, seed=1)
    identity = KvIdentity("a-model", "main", SMALL)
    kinds = choose_kinds(["shm", "tcp"], pool)
    made = Exporter("p0", "life-1", identity, pool, ManualClock(), kinds)
    await made.start("127.0.0.1")
    yield made
    await made.close()
    pool.close()


@pytest.fixture
async def puller() -> AsyncIterator[Puller]:
    pool = make_pool(SMALL, 8)
    identity = KvIdentity("a-model", "main", SMALL)
    made = Puller(pool, identity, host_id(), choose_kinds(["shm", "tcp"], pool))
    yield made
    await made.close()
    pool.close()


def with_offers(welcome: ExporterWelcome, **endpoints: str) -> ExporterWelcome:
    """The welcome with these offers replaced."""
    offers = {offer.name: offer.endpoint for offer in welcome.offers} | endpoints
    changed = [TransportOffer(name=name, endpoint=endpoint) for name, endpoint in offers.items()]
    return msgspec.structs.replace(welcome, offers=changed)


@contextmanager
def silent_unix_listener() -> Iterator[str]:
    """Somebody who accepts (in the kernel) and says nothing, as a stopped process does."""
    name = f"pdserve-test-{secrets.token_hex(8)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        yield name


async def test_the_same_host_takes_shared_memory(
    exporter: Exporter, puller: Puller, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    link = await puller.connect(exporter.welcome(), timeout_s=30)
    assert (link.transport, link.reason) == ("shm", "the best transport there is")
    assert "pulling from p0 by shm" in caplog.text
    assert exporter.statistics.pools_shared == 1
    await link.close()


async def test_without_descriptors_there_is_no_transport(
    exporter: Exporter, puller: Puller
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        with pytest.raises(PeerLost, match=r"shm: .*Too many open files"):
            await puller.connect(exporter.welcome(), timeout_s=30)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


async def test_another_host_takes_tcp(exporter: Exporter, puller: Puller) -> None:
    welcome = msgspec.structs.replace(exporter.welcome(), host_id="elsewhere")
    link = await puller.connect(welcome, timeout_s=30)
    assert (link.transport, link.reason) == ("tcp", "shm: another host")
    await link.close()


async def test_a_transport_that_is_not_offered_is_passed_over(
    exporter: Exporter, puller: Puller
) -> None:
    exporter.offers = [offer for offer in exporter.offers if offer.name != "shm"]
    link = await puller.connect(exporter.welcome(), timeout_s=30)
    assert (link.transport, link.reason) == ("tcp", "shm: not offered")
    await link.close()


async def test_when_the_descriptor_cannot_be_obtained_tcp_is_taken(
    exporter: Exporter, puller: Puller
) -> None:
    link = await puller.connect(with_offers(exporter.welcome(), shm="nobody"), timeout_s=30)
    assert link.transport == "tcp"
    assert "cannot be obtained" in link.reason
    await link.close()


async def test_a_pool_of_another_size_is_not_mapped(exporter: Exporter, puller: Puller) -> None:
    welcome = msgspec.structs.replace(exporter.welcome(), num_blocks=9)
    link = await puller.connect(welcome, timeout_s=30)
    assert link.transport == "tcp"
    assert "8 blocks" in link.reason
    assert "one of 9" in link.reason
    await link.close()


async def test_a_silent_transport_leaves_time_for_the_next(
    exporter: Exporter, puller: Puller
) -> None:
    with silent_unix_listener() as name:
        link = await puller.connect(with_offers(exporter.welcome(), shm=name), timeout_s=2.0)
    assert (link.transport, link.reason) == ("tcp", "shm: no answer in time")
    await link.close()


async def test_silence_alone_is_a_timeout(exporter: Exporter, puller: Puller) -> None:
    started_s = time.monotonic()
    with silent_unix_listener() as name:
        welcome = with_offers(exporter.welcome(), shm=name, tcp="127.0.0.1:1")
        with pytest.raises(TransferTimeout, match=r"shm: no answer in time; tcp: cannot connect"):
            await puller.connect(welcome, timeout_s=0.2)
    assert time.monotonic() - started_s < 20


@pytest.mark.parametrize("endpoint", ["127.0.0.1:1", "", "nonsense", "127.0.0.1:port"])
async def test_nobody_there_is_a_lost_peer(
    exporter: Exporter, puller: Puller, endpoint: str
) -> None:
    welcome = with_offers(exporter.welcome(), shm="nobody", tcp=endpoint)
    with pytest.raises(PeerLost, match=r"shm: .*; tcp: cannot connect"):
        await puller.connect(welcome, timeout_s=30)


async def test_another_model_is_refused_with_both_fingerprints(
    exporter: Exporter, puller: Puller
) -> None:
    other = KvIdentity("another-model", "main", SMALL)
    welcome = msgspec.structs.replace(exporter.welcome(), fingerprint=other.fingerprint)
    with pytest.raises(LayoutMismatch) as caught:
        await puller.connect(welcome, timeout_s=30)
    assert other.fingerprint in str(caught.value)
    assert exporter.identity.fingerprint in str(caught.value)


async def test_another_model_of_another_block_size_is_refused_too(
    exporter: Exporter, puller: Puller
) -> None:
    layout = KvLayout(2, 2, 8, 16, KvDtype.FLOAT32)
    other = KvIdentity("another-model", "main", layout)
    welcome = msgspec.structs.replace(
        exporter.welcome(), fingerprint=other.fingerprint, layout=layout
    )
    with pytest.raises(LayoutMismatch, match="fingerprint"):
        await puller.connect(welcome, timeout_s=30)


async def test_closing_twice_is_fine(exporter: Exporter, puller: Puller) -> None:
    link = await puller.connect(exporter.welcome(), timeout_s=30)
    await asyncio.gather(link.close(), link.close())
