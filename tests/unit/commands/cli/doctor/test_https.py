"""A coordinator that speaks HTTPS is asked like any other, and its certificate looked at."""

from __future__ import annotations

import asyncio
import datetime
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
from aiohttp import web

from pdserve.commands.cli.doctor.cluster.https import https_end
from pdserve.commands.cli.main import main
from pdserve.shared.errors import ClusterError
from tests.fakes.http import serving
from tests.unit.commands.cli.doctor.statuses import cluster

pytest.importorskip("cryptography", reason="the certs extra is not installed")
from pdserve.commands.cli.certs import make


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return make(tmp_path, "coordinator", ["127.0.0.1"], datetime.timedelta(days=10))


@pytest_asyncio.fixture
async def url(keys: Path) -> AsyncIterator[str]:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(keys / "tls.crt", keys / "tls.key")
    body = msgspec.json.encode(cluster())

    async def status(request: web.Request) -> web.Response:
        return web.Response(body=body)

    async with serving(web.get("/status", status), tls=tls) as url:
        yield url


async def test_the_certificate_is_told_when_it_ends_soon(
    url: str, keys: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["doctor", "--cluster", url, "--ca", str(keys / "ca.crt")]
    assert await asyncio.to_thread(main, command) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert f"the certificate of HTTPS at {url} ends in 10.0 days" in first
    assert all(line.startswith("ok ") for line in others)


async def test_a_certificate_that_is_not_to_be_trusted_is_a_problem(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await asyncio.to_thread(main, ["doctor", "--cluster", url]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith(f"problem  coordinators  no coordinator to be trusted at {url}")
    with pytest.raises(ClusterError, match="verify failed"):
        await https_end(url)


async def test_http_has_none() -> None:
    assert await https_end("http://127.0.0.1:1") is None
