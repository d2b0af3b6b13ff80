"""TLS between nodes: the bytes arrive, nobody else can read them, and who may not pull may not."""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import shutil
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kv_transfer.exporter import Exporter
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.transports import tls
from kv_transfer.transports.catalog import TransportKind, choose_kinds
from kv_transfer.transports.pull_server import PullLimits
from kv_transfer.transports.tcp import TcpTransport
from kv_transfer.transports.tcp_server import TcpServer
from kv_transfer.transports.tls import NodeTls
from pdserve.kv import KvLayout
from pdserve.shared.clock import ManualClock
from pdserve.shared.errors import ConfigError, TransferError
from tests.unit.kv_transfer.gpu_pairs import nccl, open_gpu_pair
from tests.unit.kv_transfer.pairs import (
    LARGE,
    NEEDS_NIXL,
    SMALL,
    endless_pull,
    make_pool,
    open_pair,
    tokens_of,
)
from tests.waits import at_its_deadline

pytest.importorskip("cryptography", reason="the certs extra is not installed")
from pdserve.commands.cli.certs import make

DAY = datetime.timedelta(days=1)
IDENTITY = KvIdentity("a-model", "main", LARGE)
TABLE = [5, 3, 9]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of one CA for both roles; one of another CA; and one that has expired."""
    root = tmp_path_factory.mktemp("keys")
    make(root / "ours", "node", [], DAY)
    make(root / "ours", "coordinator", [], DAY)
    make(root / "other", "node", [], DAY)
    shutil.copytree(root / "ours", root / "old")
    make(root / "old", "node", [], datetime.timedelta(seconds=-1))
    return root


def tls_of(keys: Path, name: str) -> NodeTls | None:
    return NodeTls(keys / name) if name else None


@pytest.mark.parametrize("layout", [SMALL, LARGE], ids=["small spans", "large spans"])
async def test_a_pull_over_tls_is_exact(keys: Path, layout: KvLayout) -> None:
    async with open_pair("tcp", layout, tls=NodeTls(keys / "ours/node")) as pair:
        size, begin, end = layout.block_size, 1, 3 * layout.block_size - 1
        for _ in range(2):  # also over a connection that was idle
            ticket = pair.exporter.issue("r", begin, end - begin, TABLE)
            await pair.pull(ticket, [0, 1, 2], begin)
        expected = tokens_of(pair.source, layout, TABLE, begin, end)
        found = tokens_of(pair.destination, layout, [0, 1, 2], begin, end)
        np.testing.assert_array_equal(found, expected)
        assert size > 1


async def test_a_large_pull_takes_two_connections_and_is_exact(keys: Path) -> None:
    async with open_pair("tcp", LARGE, tls=NodeTls(keys / "ours/node")) as pair:
        table, size = list(range(24, 0, -1)), LARGE.block_size
        ticket = pair.exporter.issue("r", 0, 24 * size, table)
        result = await pair.pull(ticket, list(range(24)))
        assert result.bytes == 24 << 20
        np.testing.assert_array_equal(pair.destination.data[:24], pair.source.data[table])


async def test_nothing_writes_once_a_pull_is_cancelled(keys: Path) -> None:
    async with (
        open_pair("tcp", LARGE, tls=NodeTls(keys / "ours/node")) as pair,
        endless_pull(pair) as task,
    ):
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def exporting(
    secured: NodeTls | None, limits: PullLimits | None = None
) -> AsyncIterator[Exporter]:
    pool = make_pool(LARGE, 8, seed=1)
    server = partial(TcpServer, limits=limits)
    kinds = [TransportKind("tcp", server, TcpTransport, frozenset({"cpu"}))]
    exporter = Exporter("p0", "life-1", IDENTITY, pool, ManualClock(), kinds, tls=secured)
    await exporter.start("127.0.0.1")
    try:
        yield exporter
    finally:
        await exporter.close()
        pool.close()


async def pull(exporter: Exporter, secured: NodeTls | None, endpoint: str = "") -> bytes:
    """Pull block 3 by a new puller; returns what has arrived."""
    welcome = exporter.welcome()
    if endpoint:
        offers = [msgspec.structs.replace(welcome.offers[0], endpoint=endpoint)]
        welcome = msgspec.structs.replace(welcome, offers=offers)
    pool = make_pool(LARGE, 4)
    puller = Puller(pool, IDENTITY, host_id(), choose_kinds(["tcp"], pool), tls=secured)
    try:
        link = await puller.connect(welcome, timeout_s=30)
        try:
            ticket = exporter.issue("r", 0, LARGE.block_size, [3])
            await puller.pull(link, ticket, [2], 0, timeout_s=30)
        finally:
            await link.close()
        return pool.data[2].tobytes()
    finally:
        await puller.close()
        pool.close()


def port_of(exporter: Exporter) -> int:
    return int(exporter.offers[0].endpoint.rpartition(":")[2])


@asynccontextmanager
async def tapped(exporter: Exporter) -> AsyncIterator[tuple[str, bytearray]]:
    """An address that leads to the exporter, and all bytes that pass there."""
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(2**16):
            seen.extend(data)
            writer.write(data)
            await writer.drain()
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port_of(exporter))
        await asyncio.gather(pump(reader, up_writer), pump(up_reader, writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield "127.0.0.1:" + str(server.sockets[0].getsockname()[1]), seen


async def test_no_key_encrypts_too_much(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "MAX_BYTES", 2 * LARGE.block_bytes)
    accept, accepted = NodeTls.accept, []

    async def note(self: NodeTls, sock: socket.socket) -> ssl.SSLSocket:
        accepted.append(sock)
        return await accept(self, sock)

    monkeypatch.setattr(NodeTls, "accept", note)
    async with open_pair("tcp", LARGE, tls=NodeTls(keys / "ours/node")) as pair:
        for num_connections in (1, 1, 2, 2, 3):
            ticket = pair.exporter.issue("r", 0, LARGE.block_size, [3])
            await pair.pull(ticket, [2])
            assert len(accepted) == num_connections


@pytest.mark.long
@NEEDS_NIXL
async def test_the_control_connection_of_ucx_is_secured_too(keys: Path) -> None:
    async with open_pair("ucx", SMALL, tls=NodeTls(keys / "ours/node")) as pair:
        await pair.pull(pair.exporter.issue("r", 0, SMALL.block_size, [3]), [2])
        np.testing.assert_array_equal(pair.destination.data[2], pair.source.data[3])
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(pair.exporter))
        writer.write(b"pdKV" + pair.exporter.welcome().access)
        async with asyncio.timeout(30):
            with suppress(ConnectionError):
                assert not (await reader.read()).startswith(b"pdKV")  # an alert, and the end
        writer.close()
        assert pair.exporter.statistics.garbage == 1


async def test_the_control_connection_of_nccl_is_secured_too(keys: Path) -> None:
    async with open_gpu_pair(nccl(), tls=NodeTls(keys / "ours/node")) as pair:
        for _ in range(2):
            await pair.pull(pair.issue(3, 5), [7, 9])
        assert (pair.destination.data[[7, 9]] == pair.source.data[[3, 5]]).all()
        assert pair.host.num_communicators == 2


@pytest.mark.parametrize("is_secured", [True, False])
async def test_who_listens_on_the_wire_learns_nothing(keys: Path, is_secured: bool) -> None:
    ours = NodeTls(keys / "ours/node") if is_secured else None
    async with exporting(ours) as exporter, tapped(exporter) as (endpoint, seen):
        arrived = await pull(exporter, ours, endpoint)
        assert arrived == exporter.pool.data[3].tobytes()
        assert len(seen) > len(arrived)
        assert (arrived[1000:1032] in seen) != is_secured
        assert (b"pdKV" in seen) != is_secured


@pytest.mark.parametrize(
    ("exporters", "pullers", "puller_says", "exporter_says"),
    [
        ("ours/node", "other/node", "certificate verify failed", "unknown ca"),
        ("ours/node", "old/node", "certificate expired", "certificate has expired"),
        ("old/node", "ours/node", "certificate has expired", "certificate expired"),
        ("ours/node", "ours/coordinator", "closed", "is for coordinator.pdserve, not for node"),
        ("ours/coordinator", "ours/node", "Hostname mismatch", "alert"),
        ("ours/node", "", "closed|reset", "wrong version|unexpected|http request"),
        ("", "ours/node", "closed|reset|wrong version", "instead of an access token"),
    ],
)
async def test_who_may_not_pull_is_refused_with_a_line_at_both_ends(
    keys: Path,
    exporters: str,
    pullers: str,
    puller_says: str,
    exporter_says: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with exporting(tls_of(keys, exporters)) as exporter:
        with pytest.raises(TransferError) as refused:
            await pull(exporter, tls_of(keys, pullers))
        assert re.search(puller_says, str(refused.value)), refused.value
        assert exporter.statistics.pulls_served == 0
    lines = [r.getMessage() for r in caplog.records if "a connection for KV was" in r.getMessage()]
    assert re.search(exporter_says, " ".join(lines).replace("_", " "), re.IGNORECASE), lines


async def test_a_connection_without_a_handshake_is_closed_at_its_deadline(keys: Path) -> None:
    ours = NodeTls(keys / "ours/node")
    async with exporting(ours) as exporter:
        reader, writer = await asyncio.open_connection("127.0.0.1", port_of(exporter))
        reading = asyncio.ensure_future(reader.read())
        assert await at_its_deadline(reading, PullLimits().request_s) == b""
        writer.close()
        assert exporter.statistics.garbage == 1
        assert await pull(exporter, ours)


async def test_new_certificates_count_without_a_restart(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = shutil.copytree(keys / "ours/node", tmp_path / "mine")
    ours = NodeTls(mine)
    async with exporting(ours) as exporter:
        assert await pull(exporter, NodeTls(keys / "ours/node"))
        (mine / "tls.crt").write_text("half a certif")
        assert await pull(exporter, NodeTls(keys / "ours/node"))
        assert "the old ones stay in use" in caplog.text
        for file in (keys / "other/node").iterdir():
            os.replace(shutil.copy(file, tmp_path / file.name), mine / file.name)
        assert await pull(exporter, NodeTls(keys / "other/node"))
        assert await pull(exporter, ours)  # the other end of the same node
        with pytest.raises(TransferError):
            await pull(exporter, NodeTls(keys / "ours/node"))


def test_unusable_files_are_named(keys: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(keys / "ours/node", tmp_path / "mixed")
    shutil.copy(keys / "other/node/tls.key", mixed)
    for directory in (mixed, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"ca\.crt, tls\.crt and tls\.key in .* fit together"):
            NodeTls(directory)
