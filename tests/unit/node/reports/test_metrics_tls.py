"""A node's metrics port in a cluster with certificates: who reads what."""

from __future__ import annotations

import datetime
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from pdserve.commands.simulation.calibrate.samples import NodeReader
from pdserve.node.reports.metrics_server import MetricsServer
from pdserve.shared.errors import ClusterError
from pdserve.shared.process.certificates import CA_FILE, mutual_context, role_name
from tests.unit.commands.simulation.test_reader import log_of

pytest.importorskip("cryptography", reason="the certs extra is not installed")
from pdserve.commands.cli.certs import make

DAY = datetime.timedelta(days=1)
ALL = ["/health", "/metrics", "/samples"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two CAs with a certificate per role."""
    root = tmp_path_factory.mktemp("keys")
    for authority in ("ours", "other"):
        make(root / authority, "node", [], DAY)
        make(root / authority, "monitor", [], DAY)
    return root


async def no_reader(shown: str | None) -> bool:
    return False


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[str]:
    """The address of a node's server; it has measured a step."""
    server = MetricsServer(lambda: iter(()), log_of(1).since, lambda: "ready", no_reader, directory)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.close()


async def statuses(address: str, tls: ssl.SSLContext) -> list[int]:
    """What is answered to a client that has connected anew."""
    url, name, found = f"https://{address}", role_name("node"), []
    async with aiohttp.ClientSession(url) as client:
        for path in ALL:
            async with client.get(path, ssl=tls, server_hostname=name) as response:
                found.append(response.status)
    return found


def monitor(authority: Path) -> ssl.SSLContext:
    return mutual_context(ssl.PROTOCOL_TLS_CLIENT, authority / "monitor")


async def test_a_certificate_is_needed_but_for_probes(keys: Path) -> None:
    async with serving(keys / "ours/node") as address:
        assert await statuses(address, monitor(keys / "ours")) == [200, 200, 200]
        nobody = ssl.create_default_context(cafile=keys / "ours" / CA_FILE)
        assert await statuses(address, nobody) == [200, 403, 403]
        stranger = monitor(keys / "other")
        stranger.load_verify_locations(keys / "ours" / CA_FILE)
        with pytest.raises(aiohttp.ClientError):
            await statuses(address, stranger)
        async with aiohttp.ClientSession() as client:
            with pytest.raises(aiohttp.ClientError):
                await client.get(f"http://{address}/health")


async def test_new_certificates_count_from_the_next_connection_on(
    keys: Path, tmp_path: Path
) -> None:
    mine = shutil.copytree(keys / "ours/node", tmp_path / "mine")
    async with serving(mine) as address:
        for file in (keys / "other/node").iterdir():
            os.replace(shutil.copy(file, tmp_path / "new"), mine / file.name)
        assert await statuses(address, monitor(keys / "other")) == [200, 200, 200]
        with pytest.raises(aiohttp.ClientError):
            await statuses(address, monitor(keys / "ours"))


async def test_samples_are_read_with_a_certificate(keys: Path) -> None:
    async with serving(keys / "ours/node") as address, aiohttp.ClientSession() as session:
        recording = await NodeReader(session, [address], monitor(keys / "ours")).read()
        assert [step.number for step in recording.steps["d"]] == [1]
        with pytest.raises(ClusterError, match=f"cannot read https://{address}/samples"):
            await NodeReader(session, [address], monitor(keys / "other")).read()
