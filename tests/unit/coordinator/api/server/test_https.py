"""HTTPS: who is served, who is not, and what is said to them and to the operator."""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import shutil
import socket
import ssl
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from coordinator.api.server import https
from coordinator.tenants import Tenants
from pdserve.commands.cluster.coordinator_http import Trust, request, trust_in
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from pdserve.shared.errors import ClusterError, ConfigError
from tests.fakes.generator import MODEL, FakeGenerator, says
from tests.matrix import matrix
from tests.unit.coordinator.api.harness import Harness, events_of, served
from tests.unit.coordinator.api.raw_client import connected
from tests.unit.coordinator.api.test_tenants import clock, tenants, usage

pytest.importorskip("cryptography", reason="the certs extra is not installed")
from pdserve.commands.cli.certs import make

__all__ = ["clock", "tenants", "usage"]  # fixtures
DAY = datetime.timedelta(days=1)
HERE = ["127.0.0.1"]
Run = Callable[[Coroutine[Any, Any, None]], None]
both_loops = pytest.mark.parametrize(
    "run", matrix([uvloop.run, asyncio.run], 1), ids=["uvloop", "asyncio"]
)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CA with a certificate of this address, and others that are not to be trusted."""
    root = tmp_path_factory.mktemp("keys")
    make(root / "ours", "coordinator", HERE, DAY)
    make(root / "other", "coordinator", HERE, DAY)
    make(root / "elsewhere", "coordinator", ["api.example.org"], DAY)
    make(root / "old", "coordinator", HERE, datetime.timedelta(seconds=-1))
    return root


def of(directory: Path) -> Trust:
    return trust_in(directory / "ca.crt")


async def is_well(api: Harness, trust: Trust) -> bool:
    url = api.server.url
    return (await request("GET", url, "/health", timeout_s=10, trust=trust))[0] == 200


@both_loops
def test_long_bodies_and_streams_go_over_tls(run: Run, keys: Path) -> None:
    text = "hello to the world " * 20

    async def ask() -> None:
        generator = FakeGenerator(says(text))
        async with served(generator, https_dir=keys / "ours/coordinator") as api:
            assert api.server.url.startswith("https://127.0.0.1:")
            body = {"model": MODEL, "prompt": "Hi", "stream": True, "max_tokens": 500}
            url, trust = "/v1/completions", of(keys / "ours")
            async with api.client.post(url, json=body, ssl=trust) as response:
                raw = await response.read()
            body["prompt"] = "Hi " * 2**15
            async with api.client.post(url, json=body, ssl=trust) as response:
                assert f"{3 * 2**15} characters" in (await response.json())["error"]["message"]
        heard = [e["choices"][0]["text"] for e in events_of(raw) if isinstance(e, dict)]
        assert "".join(heard) == text

    run(ask())


@both_loops
def test_a_client_that_speaks_before_it_is_heard_is_answered(run: Run, keys: Path) -> None:
    """Its first bytes are there when the connection is accepted, as where machines are busy."""

    async def ask() -> None:
        async with served(https_dir=keys / "ours/coordinator") as api:
            trust = of(keys / "ours")
            assert isinstance(trust, ssl.SSLContext)
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = trust.wrap_bio(incoming, outgoing, server_hostname="127.0.0.1")
            with suppress(ssl.SSLWantReadError):
                tls.do_handshake()
            # All of this in one turn of the event loop, which so accepts the connection late.
            host, port = api.server.url.removeprefix("https://").split(":")
            with socket.create_connection((host, int(port))) as sock:
                sock.sendall(outgoing.read())
                sock.setblocking(False)
                async with asyncio.timeout(https.HANDSHAKE_S / 2):
                    incoming.write(await asyncio.get_running_loop().sock_recv(sock, 2**16))
                tls.do_handshake()
            assert tls.version() == "TLSv1.3"

    run(ask())


@both_loops
def test_new_certificates_count_without_a_restart(run: Run, keys: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(keys / "ours/coordinator", tmp_path / "mine")

    async def renew() -> None:
        async with served(https_dir=mine) as api:
            assert await is_well(api, of(keys / "ours"))
            (mine / "tls.crt").write_text("half a certif")
            assert await is_well(api, of(keys / "ours"))
            for name in ("tls.crt", "tls.key"):
                os.replace(
                    shutil.copy(keys / "other/coordinator" / name, tmp_path / name), mine / name
                )
            assert await is_well(api, of(keys / "other"))
            with pytest.raises(ClusterError, match="--ca"):
                await is_well(api, of(keys / "ours"))

    run(renew())


@pytest.mark.parametrize(
    ("shown", "trusted", "why"),
    [
        ("ours", "other", "unable to get local issuer certificate"),
        ("old", "old", "certificate has expired"),
        ("elsewhere", "elsewhere", "IP address mismatch"),
    ],
)
async def test_who_is_not_trusted_is_named_with_the_reason(
    keys: Path, shown: str, trusted: str, why: str
) -> None:
    async with served(https_dir=keys / shown / "coordinator") as api:
        with pytest.raises(ClusterError, match=f"to be trusted at https://.*{why}.*--ca"):
            await is_well(api, of(keys / trusted))
        with pytest.raises(ClusterError, match=r"to be trusted .* \(--ca or SSL_CERT_FILE names"):
            await is_well(api, True)  # this machine knows none of them


async def test_a_client_that_refuses_leaves_one_line(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def greet(port: int) -> None:
        context = of(keys / "old")
        assert isinstance(context, ssl.SSLContext)
        with (
            socket.create_connection(("127.0.0.1", port)) as sock,
            pytest.raises(ssl.SSLCertVerificationError),
        ):
            context.wrap_socket(sock, server_hostname="127.0.0.1")

    async with served(https_dir=keys / "old/coordinator") as api:
        await asyncio.to_thread(greet, api.server.port)
        await asyncio.to_thread(greet, api.server.port)  # nobody fills the log
        with pytest.raises(ClusterError):
            await is_well(api, of(keys / "old"))
    (line,) = [r.getMessage() for r in caplog.records if "no TLS with" in r.getMessage()]
    assert "tls.crt in" in caplog.text, "at the start"
    assert re.search("at 127.0.0.1: .*certificate.expired", line, re.IGNORECASE)


@pytest.mark.long
async def test_the_environment_names_a_ca_too(keys: Path) -> None:
    async with served(https_dir=keys / "ours/coordinator") as api:
        status = await asyncio.create_subprocess_exec(
            *OWN_COMMAND,
            *("status", "--url", api.server.url),
            env={**os.environ, "SSL_CERT_FILE": str(keys / "ours/ca.crt")},
            stdout=asyncio.subprocess.PIPE,
        )
        said, _ = await status.communicate()
    assert b"no node is attached" in said


async def test_a_server_without_https_is_said_to_have_none() -> None:
    async with served() as api:
        secure = api.server.url.replace("http:", "https:")
        with pytest.raises(ClusterError, match=r"no HTTPS at https://.*: write http://"):
            await request("GET", secure, "/health", timeout_s=10)


async def test_plain_http_is_not_answered(keys: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with served(https_dir=keys / "ours/coordinator") as api:
        plain = api.server.url.replace("https:", "http:")
        with pytest.raises(ClusterError, match="no coordinator at http://"):
            await request("GET", plain, "/health", timeout_s=10)
    assert "http request" in caplog.text


@both_loops
def test_a_request_may_come_with_the_end_of_the_handshake(run: Run, keys: Path) -> None:
    context = of(keys / "ours")
    assert isinstance(context, ssl.SSLContext)

    async def ask() -> None:
        async with served(https_dir=keys / "ours/coordinator") as api, connected(api) as client:
            to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
            tls = context.wrap_bio(to_client, to_server, server_hostname="127.0.0.1")
            async with asyncio.timeout(30):
                while True:
                    with suppress(ssl.SSLWantReadError):
                        tls.do_handshake()
                        break
                    client.writer.write(to_server.read())
                    to_client.write(await client.reader.read(2**16))
                tls.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
                client.writer.write(to_server.read())  # in one piece
                while True:
                    to_client.write(await client.reader.read(2**16))
                    with suppress(ssl.SSLWantReadError):
                        assert tls.read(12) == b"HTTP/1.1 200"
                        break

    run(ask())


@both_loops
def test_who_is_silent_has_a_place_but_not_for_long(run: Run, keys: Path) -> None:
    async def wait() -> None:
        folder = keys / "ours/coordinator"
        async with (
            served(https_dir=folder, max_connections=1, handshake_timeout_s=1.0) as api,
            connected(api) as silent,
            asyncio.timeout(30),
        ):
            with pytest.raises(ClusterError):
                await is_well(api, of(keys / "ours"))
            assert await silent.read_until_broken() == b""
            assert await is_well(api, of(keys / "ours"))

    run(wait())


@both_loops
def test_an_address_without_a_key_loses_its_oldest_handshake(
    run: Run, keys: Path, tenants: Tenants
) -> None:
    async def flood() -> None:
        async with (
            served(tenants=tenants, https_dir=keys / "ours/coordinator", max_connections=16) as api,
            AsyncExitStack() as stack,
            asyncio.timeout(30),
        ):
            silent = [await stack.enter_async_context(connected(api)) for _ in range(20)]
            for client in silent[:18]:
                assert await client.read_until_broken() == b""
            assert await is_well(api, of(keys / "ours"))

    run(flood())


@both_loops
def test_the_end_does_not_wait_for_handshakes(run: Run, keys: Path) -> None:
    async def end() -> None:
        async with served(https_dir=keys / "ours/coordinator") as api, connected(api) as silent:
            assert await is_well(api, of(keys / "ours"))  # so the silent one has been accepted
            async with asyncio.timeout(30):
                await api.server.stop(grace_s=0)
                assert await silent.read_until_broken() == b""

    run(end())


async def test_unusable_files_are_named(keys: Path, tmp_path: Path) -> None:
    mixed = shutil.copytree(keys / "ours/coordinator", tmp_path / "mixed")
    shutil.copy(keys / "other/coordinator/tls.key", mixed)
    for directory in (mixed, tmp_path / "nowhere"):
        with pytest.raises(ConfigError, match=r"access\.https_dir: tls\.crt and tls\.key in"):
            async with served(https_dir=directory):
                pass
    with pytest.raises(ConfigError, match=r"--ca .*nowhere has no certificate of a CA"):
        trust_in(tmp_path / "nowhere")
