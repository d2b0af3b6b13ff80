"""Real gRPC over TLS and with tokens: who is let in, who is not, and what is said to them."""

from __future__ import annotations

import asyncio
import datetime
import logging
import os
import shutil
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pdserve.settings.access import SecurityConfig
from pdserve.shared.errors import ConfigError
from pdserve.shared.process.certificates import Role
from pdserve.wire import coordinator_pb2_grpc
from pdserve.wire.channel import Server, open_channel
from pdserve.wire.coordinator_pb2 import CoordinatorMessages, NodeMessages, Reader, Reading
from pdserve.wire.security import OPEN, Refused, Security, check_exposure, tell_nobody

pytest.importorskip("cryptography", reason="the certs extra is not installed")
from pdserve.commands.cli.certs import make, run

DAY = datetime.timedelta(days=1)
TOKEN = "a token of the cluster"


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One CA with a certificate per role; another CA; and a certificate that has expired."""
    root = tmp_path_factory.mktemp("keys")
    make(root / "ours", "coordinator", ["127.0.0.1", "api.example.org"], DAY)
    make(root / "ours", "node", [], DAY)
    make(root / "ours", "monitor", [], DAY)
    make(root / "other", "node", [], DAY)
    shutil.copytree(root / "ours", root / "old")
    make(root / "old", "node", [], datetime.timedelta(seconds=-1))
    return root


class Echo(coordinator_pb2_grpc.CoordinatorServicer):
    async def Attach(self, requests: object, context: object) -> None:  # noqa: N802
        await context.read()  # type: ignore[attr-defined]
        await context.write(CoordinatorMessages())  # type: ignore[attr-defined]


class Yes(coordinator_pb2_grpc.ReadersServicer):
    async def MayRead(self, request: object, context: object) -> Reading:  # noqa: N802
        return Reading(may_read=True)


@asynccontextmanager
async def serving(security: Security, on_refused: Refused = tell_nobody) -> AsyncIterator[str]:
    server = Server(60, security, on_refused)
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Echo(), server.grpc)
    coordinator_pb2_grpc.add_ReadersServicer_to_server(Yes(), server.grpc)
    port = await server.start("127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def call(address: str, security: Security, peer: Role = "coordinator") -> None:
    """Attach and hear something; tried again where a stream ends within a write, with no reason."""
    for _ in range(9):
        try:
            await call_once(address, security, peer)
        except grpc.aio.AioRpcError as error:
            if "execute_batch" not in error.debug_error_string():
                raise
        else:
            return
    raise AssertionError("gRPC never says why the stream has ended")


async def call_once(address: str, security: Security, peer: Role) -> None:
    async with open_channel(address, 60, security, peer) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        stream = stub.Attach(metadata=security.metadata, timeout=10)
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await stream.write(NodeMessages())  # why not, the read says
        assert await stream.read() is not grpc.aio.EOF, await stream.details()


async def test_nodes_and_coordinators_know_each_other_by_their_certificates(keys: Path) -> None:
    async with serving(Security(keys / "ours/coordinator")) as coordinator:
        await call(coordinator, Security(keys / "ours/node"))
    async with serving(Security(keys / "ours/node")) as node:
        await call(node, Security(keys / "ours/node"), "node")


@pytest.mark.parametrize(
    ("server", "client", "said"),
    [
        ("ours/coordinator", "other/node", "(?i)certificate|ssl|handshake"),
        ("ours/coordinator", "old/node", "(?i)certificate|ssl|handshake|closed|reset"),
        ("ours/coordinator", "ours/coordinator", "not for node.pdserve"),
        ("ours/coordinator", "ours/monitor", "not for node.pdserve"),
        ("ours/node", "ours/node", "(?i)coordinator.pdserve|hostname|verif"),
        ("ours/coordinator", "", "."),
        ("", "ours/node", "(?i)ssl|handshake"),
    ],
)
async def test_the_wrong_certificate_is_refused(
    keys: Path, server: str, client: str, said: str
) -> None:
    def security(name: str) -> Security:
        return Security(keys / name) if name else OPEN

    async with serving(security(server)) as address:
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await call(address, security(client))
    expected = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED}
    assert refused.value.code() in expected


async def test_single_questions_are_for_nodes_alone_too() -> None:
    async def asked(shown: Security) -> bool:
        async with open_channel(address, 60, shown, "coordinator") as channel:
            stub = coordinator_pb2_grpc.ReadersStub(channel)
            reading = await stub.MayRead(Reader(), metadata=shown.metadata, timeout=10)
        return bool(reading.may_read)

    async with serving(Security(None, TOKEN)) as address:
        assert await asked(Security(None, TOKEN))
        for shown in (OPEN, Security(None, "another token")):
            with pytest.raises(grpc.aio.AioRpcError, match="join token"):
                await asked(shown)


async def test_new_certificates_count_without_a_restart(keys: Path, tmp_path: Path) -> None:
    mine = shutil.copytree(keys / "ours/coordinator", tmp_path / "mine")
    async with serving(Security(mine)) as address:
        await call(address, Security(keys / "ours/node"))
        make(tmp_path / "next", "coordinator", [], DAY)
        make(tmp_path / "next", "node", [], DAY)
        for file in (tmp_path / "next/coordinator").iterdir():
            os.replace(file, mine / file.name)
        await call(address, Security(tmp_path / "next/node"))
        with pytest.raises(grpc.aio.AioRpcError):
            await call(address, Security(keys / "ours/node"))


async def test_broken_new_certificates_leave_the_old_ones_in_use(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = shutil.copytree(keys / "ours/coordinator", tmp_path / "mine")
    async with serving(Security(mine)) as address:
        (mine / "tls.crt").write_text("half a certif")
        await call(address, Security(keys / "ours/node"))
    assert "the old ones stay in use" in caplog.text


@pytest.mark.parametrize(
    ("token", "said"), [("", "no join token was shown"), (TOKEN + "?", "is not the cluster's")]
)
async def test_only_who_has_the_token_joins(
    token: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    security, refused = replace(OPEN, token=TOKEN), dict[str, str]()
    async with serving(security, refused.__setitem__) as address:
        await call(address, security)
        with caplog.at_level(logging.WARNING), pytest.raises(grpc.aio.AioRpcError, match=said):
            await call(address, replace(OPEN, token=token))
    assert said in caplog.text
    assert said in refused["127.0.0.1"]
    assert TOKEN not in caplog.text


@pytest.mark.parametrize("host", ["10.0.0.1", "0.0.0.0", "::", "node-1.example.org"])
def test_beyond_this_machine_something_must_protect_the_cluster(host: str) -> None:
    with pytest.raises(ConfigError, match=r"tls_dir.*join_token_file.*insecure"):
        check_exposure(SecurityConfig(), host)
    for said in ({"tls_dir": "d"}, {"join_token_file": "f"}, {"insecure": True}):
        check_exposure(SecurityConfig(**said), host)
    for here in ("127.0.0.1", "::1", "localhost"):
        check_exposure(SecurityConfig(), here)


def test_who_has_an_expired_certificate_says_so(
    keys: Path, caplog: pytest.LogCaptureFixture
) -> None:
    Security.of(SecurityConfig(tls_dir=str(keys / "ours/node")))
    assert not caplog.text
    Security.of(SecurityConfig(tls_dir=str(keys / "old/node")))
    assert f"others will refuse tls.crt in {keys / 'old/node'}" in caplog.text
    assert "certificate has expired" in caplog.text


def test_unusable_files_are_named(keys: Path, tmp_path: Path) -> None:
    short = tmp_path / "token"
    short.write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16"):
        Security.of(SecurityConfig(join_token_file=str(short)))
    with pytest.raises(ConfigError, match=r"ca\.crt"):
        Security.of(SecurityConfig(tls_dir=str(tmp_path)))
    mixed = shutil.copytree(keys / "ours/node", tmp_path / "mixed")
    shutil.copy(keys / "other/node/tls.key", mixed)
    with pytest.raises(ConfigError, match="do not fit together"):
        Security.of(SecurityConfig(tls_dir=str(mixed)))


def test_made_keys_are_their_owners_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path, "node", [], 30)
    authority, first = ((tmp_path / n).read_bytes() for n in ("ca.crt", "node/tls.crt"))
    run(tmp_path, "node", [], 30)
    assert (tmp_path / "ca.crt").read_bytes() == authority
    assert (tmp_path / "node/tls.crt").read_bytes() != first
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(made) == 5
    assert {path.stat().st_mode & 0o777 for path in made} == {0o600}
    assert "keep it off" in capsys.readouterr().out


def test_made_certificates_are_as_strict_verifiers_want_them(keys: Path) -> None:
    """Python's own client verifies so from 3.13 on."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(keys / "ours/coordinator/tls.crt", keys / "ours/coordinator/tls.key")
    client = ssl.create_default_context(cafile=keys / "ours/ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname="127.0.0.1"),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    for end in [*ends, ends[0]]:
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    assert ends[0].version() == "TLSv1.3"
    assert ends[0].getpeercert()


@pytest.mark.parametrize(
    ("hosts", "days", "said"),
    [(["a host"], 90, "'a host' is neither a name"), ([], 0, "--days 0: a certificate is valid")],
)
def test_certificates_of_no_host_and_no_day_are_refused(
    tmp_path: Path, hosts: list[str], days: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        run(tmp_path, "node", hosts, days)
