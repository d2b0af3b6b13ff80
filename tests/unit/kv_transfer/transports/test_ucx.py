"""The ucx transport: what it offers, what it refuses, and that it never takes TCP."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import queue
import socket
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.threads import CopyThreads
from kv_transfer.transports.interface import Reader
from kv_transfer.transports.ucx import agent as ucx_agent
from kv_transfer.transports.ucx import offer as ucx_offer
from kv_transfer.transports.ucx import puller as ucx
from kv_transfer.transports.ucx.agent import NixlAgent, UcxRegion, missing, rdma_devices
from kv_transfer.transports.ucx.offer import UcxOffer
from kv_transfer.transports.ucx.puller import UcxChannel, UcxTransport
from kv_transfer.transports.ucx.server import UcxServer
from kv_transfer.transports.ucx.transfer import Peer
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost, StaleTicket
from tests.matrix import matrix
from tests.unit.kv_transfer.pairs import (
    NEEDS_NIXL,
    SMALL,
    Pair,
    make_exporter,
    make_pool,
    make_puller,
    open_pair,
)
from tests.unit.kv_transfer.test_processes import exporter_process, linked

ROOT = Path(__file__).parents[4]
OFFER = UcxOffer("p0@life/1", b"metadata", 4096, 0, 8192, ucx_agent.pid_namespace(), False)


@pytest.fixture
def welcome() -> ExporterWelcome:
    pool = make_pool(SMALL, 4)
    exporter, _ = make_exporter(pool, SMALL)
    pool.close()
    return exporter.welcome()


@pytest.fixture
def transport() -> UcxTransport:
    pool = ExportedPool(4, SMALL.block_bytes)
    return UcxTransport(Reader("d0", host_id(), pool, CopyThreads(1, "unused")))


def offered(offer: UcxOffer | bytes) -> TransportOffer:
    metadata = offer if isinstance(offer, bytes) else msgspec.msgpack.encode(offer)
    return TransportOffer(name="ucx", endpoint="127.0.0.1:1", metadata=metadata)


# ---- what is missing, what is in the way -------------------------------------------------------


def test_nixl_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    found = missing()
    assert found is not None
    assert "pip install -e '.[ucx]'" in found
    assert "ucx-py" in found


@NEEDS_NIXL
def test_an_environment_that_chooses_transports(monkeypatch: pytest.MonkeyPatch) -> None:
    assert missing() is None
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert "UCX_TLS" in (missing() or "")


def test_rdma_devices_have_an_active_port(tmp_path: Path) -> None:
    for device, port, state in (("mlx5_0", 1, "4: ACTIVE"), ("mlx5_1", 1, "1: DOWN")):
        folder = tmp_path / device / "ports" / str(port)
        folder.mkdir(parents=True)
        (folder / "state").write_text(f"{state}\n")
    assert rdma_devices(tmp_path) == ["mlx5_0"]
    assert rdma_devices(tmp_path / "none") == []


def test_one_host_and_one_memory_work(transport: UcxTransport, welcome: ExporterWelcome) -> None:
    assert transport.obstacle(offered(OFFER), welcome) is None


def test_what_keeps_ucx_from_being_used_is_named(
    transport: UcxTransport, welcome: ExporterWelcome
) -> None:
    def obstacle(offer: UcxOffer | bytes = OFFER, **changes: str) -> str:
        changed = msgspec.structs.replace(welcome, **changes)
        return transport.obstacle(offered(offer), changed) or "none"

    assert "another host" in obstacle(host_id="elsewhere")
    elsewhere = msgspec.structs.replace(OFFER, pid_namespace="pid:[1]")
    assert "PID namespace" in obstacle(elsewhere)
    assert "cuda to cpu" in obstacle(memory="cuda")
    assert "cannot be read" in obstacle(b"garbage")
    assert "another host" in obstacle(msgspec.structs.replace(OFFER, has_rdma=True), host_id="x")


def test_rdma_on_both_sides_removes_them(
    transport: UcxTransport, welcome: ExporterWelcome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ucx, "rdma_devices", lambda: ["mlx5_0"])
    far = msgspec.structs.replace(welcome, host_id="elsewhere", memory="cuda")
    assert transport.obstacle(offered(OFFER), far) is not None
    assert transport.obstacle(offered(msgspec.structs.replace(OFFER, has_rdma=True)), far) is None


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode(msgspec.structs.replace(OFFER, blocks=0)),
        msgspec.msgpack.encode(msgspec.structs.replace(OFFER, blocks=-4096)),
        msgspec.msgpack.encode(msgspec.structs.replace(OFFER, agent="")),
        bytes(ucx_offer._MAX_BYTES + 1),
    ],
)
def test_a_garbled_offer_loses_the_peer(garbage: bytes) -> None:
    with pytest.raises(PeerLost):
        UcxOffer.read(garbage)


# ---- with NIXL ---------------------------------------------------------------------------------


@NEEDS_NIXL
@pytest.mark.parametrize("damage", matrix(["truncated", "flipped", "beyond"], 1))
async def test_offers_that_lead_nowhere(damage: str) -> None:
    """Nobody crashes, nothing arrives, and who tells the truth is served as before."""
    async with open_pair("ucx") as pair:
        welcome = pair.exporter.welcome()
        offer = UcxOffer.read(welcome.offers[0].metadata)
        agent_metadata = bytearray(offer.agent_metadata)
        if damage == "truncated":
            offer = msgspec.structs.replace(offer, agent_metadata=bytes(agent_metadata[:100]))
        elif damage == "flipped":
            agent_metadata[20] ^= 0xFF
            offer = msgspec.structs.replace(offer, agent_metadata=bytes(agent_metadata))
        else:
            offer = msgspec.structs.replace(offer, generations=offer.generations + (1 << 30))
        metadata = msgspec.msgpack.encode(offer)
        damaged = msgspec.structs.replace(welcome.offers[0], metadata=metadata)
        puller = make_puller(pair.destination, SMALL)
        with pytest.raises(PeerLost):
            await puller.connect(msgspec.structs.replace(welcome, offers=[damaged]), timeout_s=30)
        await puller.close()
        assert not pair.destination.data.any()
        await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])


@NEEDS_NIXL
async def test_nothing_polls_once_a_puller_is_connected() -> None:
    async with open_pair("ucx") as pair:
        (server,) = pair.exporter._servers
        assert server._polling is None
        assert pair.exporter.statistics.pools_shared == 1
        await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])


@NEEDS_NIXL
async def test_an_exporter_that_closes_is_lost() -> None:
    async with open_pair("ucx") as pair:
        ticket = pair.exporter.issue("r", 0, 4, [5])
        await pair.exporter.close()
        with pytest.raises(PeerLost, match="has hung up"):
            await pair.pull(ticket, [7])


@NEEDS_NIXL
async def test_who_rings_without_a_token() -> None:
    async with open_pair("ucx") as pair:
        host, _, port = pair.exporter.offers[0].endpoint.rpartition(":")
        with socket.create_connection((host, int(port))) as sock:
            sock.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(sock, b"GET / HTTP/1.1\r\n\r\n".ljust(64))
            async with asyncio.timeout(30):
                with suppress(ConnectionError):
                    assert await loop.sock_recv(sock, 1) == b""
        assert pair.exporter.statistics.garbage == 1


async def validate(pair: Pair, block_ids: list[int]) -> None:
    size = SMALL.block_size
    ticket = pair.exporter.issue("r", 0, len(block_ids) * size, block_ids)
    await pair.pull(ticket, list(range(len(block_ids))))
    pair.source.bump([block_ids[-1]])
    with pytest.raises(StaleTicket, match=f"block {block_ids[-1]} has"):
        await pair.pull(ticket, list(range(len(block_ids))))


@NEEDS_NIXL
async def test_generations_far_apart_and_twice() -> None:
    async with open_pair("ucx", num_blocks=1000) as pair:
        pair.source.bump(list(range(0, 1000, 3)))
        await validate(pair, [999, 0, 500, 0, 65, 64, 501, 998])
        await validate(pair, list(range(0, 1000, 7)))


@NEEDS_NIXL
async def test_pulls_in_parallel_validate_each_their_own() -> None:
    async with open_pair("ucx") as pair:
        tickets = [pair.exporter.issue(f"r{i}", 0, 4, [i]) for i in range(30)]
        pair.source.bump(list(range(0, 30, 2)))
        pulls = [pair.pull(ticket, [i]) for i, ticket in enumerate(tickets)]
        results = await asyncio.gather(*pulls, return_exceptions=True)
        assert [isinstance(result, StaleTicket) for result in results] == [True, False] * 15
        odd = np.arange(1, 30, 2)
        np.testing.assert_array_equal(pair.destination.data[odd], pair.source.data[odd])


@pytest.mark.long
@NEEDS_NIXL
async def test_an_agent_that_has_to_go_is_gone_before_the_failure_is_told() -> None:
    """NIXL stops writing when its agent is destroyed, so nothing may keep it alive."""
    with exporter_process("ucx") as (process, started):
        async with linked(process, started) as peer:
            assert peer.link._route is not None
            channel = peer.link._route.channel
            assert isinstance(channel, UcxChannel)
            agent = channel._driver._thread._agent
            assert isinstance(agent, NixlAgent)
            agent.has_late_writes = True  # as with RDMA
            nixl = weakref.ref(agent._agent)
            task = await peer.start_endless()
            read = next(iter(channel._driver._thread._active))
            left: queue.SimpleQueue[object] = queue.SimpleQueue()
            read.ended.add_done_callback(lambda _: left.put(nixl()))  # on the driver's thread
            del agent
            process.kill()
            with pytest.raises(PeerLost):
                await task
            assert await asyncio.to_thread(left.get, timeout=10) is None


_LISTENERS = """
import json, psutil, sys
from kv_transfer.transports.ucx import agent as ucx_agent
def listening():
    found = psutil.Process().net_connections("tcp")
    return len([c for c in found if c.status == psutil.CONN_LISTEN])
agent = ucx_agent.NixlAgent("ours")
ours = listening()
api = ucx_agent._load()
other = api.nixl_agent("theirs", api.nixl_agent_config(enable_prog_thread=False))
print(json.dumps([ours, listening()]))
"""


@NEEDS_NIXL
def test_ours_has_no_tcp_and_others_in_the_process_have() -> None:
    """UCX listens on a port for each interface that it has TCP on."""
    done = subprocess.run(
        [sys.executable, "-c", _LISTENERS], cwd=ROOT, capture_output=True, timeout=60, check=True
    )
    ours, with_default = json.loads(done.stdout)
    assert ours == 0
    assert with_default > 0


_LIFE = """
import asyncio
from tests.unit.kv_transfer.pairs import open_pair
async def main():
    async with open_pair("ucx") as pair:
        await pair.pull(pair.exporter.issue("r", 0, 4, [5]), [7])
asyncio.run(main())
print("done")
"""


@NEEDS_NIXL
def test_a_process_that_has_used_it_ends_well_and_says_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _LIFE], cwd=ROOT, capture_output=True, timeout=60, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


# ---- over pretended agents and drivers ---------------------------------------------------------


class BlankDriver:
    """Every generation that it reads is 0."""

    @asynccontextmanager
    async def scratch(self, num_entries: int) -> AsyncIterator[np.ndarray]:
        yield np.zeros(num_entries, dtype=np.uint64)

    async def transfer(
        self, peer: Peer, source: UcxRegion, to: UcxRegion, spans: np.ndarray
    ) -> None:
        """Nothing moves."""


async def test_validating_takes_no_memory_for_blocks_that_nobody_asked_for(
    welcome: ExporterWelcome,
) -> None:
    """How many the exporter has, only the exporter has said."""
    ours, theirs = socket.socketpair()
    with theirs:
        peer = Peer("p0", 0)
        channel = UcxChannel(BlankDriver(), peer, OFFER, welcome, UcxRegion(4096, 4096), ours)
        far = np.array([(1 << 40) - 1, 3, (1 << 40) - 1])
        await channel._validate(far, np.zeros(3, dtype=np.uint64))
        with pytest.raises(StaleTicket, match="block 1099511627775 has generation 0"):
            await channel._validate(far, np.array([0, 0, 7], dtype=np.uint64))
        ours.close()


class PolledAgent:
    """Fails when it is polled."""

    is_destroyed = False

    def progress(self) -> None:
        raise TypeError("a bug")

    def destroy(self) -> None:
        self.is_destroyed = True


async def test_polling_that_fails_keeps_neither_the_next_one_nor_the_end_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pool = make_pool(SMALL, 4)
    exporter, _ = make_exporter(pool, SMALL)
    server, agent = UcxServer(exporter), PolledAgent()
    server._agent, server._num_connecting = agent, 1
    server._polling = polling = asyncio.create_task(server._poll())
    await asyncio.wait([polling])
    assert server._polling is None
    server._polling = asyncio.create_task(server._poll())
    await server.close()
    assert agent.is_destroyed
    assert "a bug" in caplog.text
    pool.close()
