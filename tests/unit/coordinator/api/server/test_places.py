"""Nobody can hold so many connections that others get none."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from coordinator.api.server.places import Places
from coordinator.tenants import Tenants
from pdserve.shared.errors import Overloaded
from tests.unit.coordinator.api.harness import Harness, served
from tests.unit.coordinator.api.raw_client import RawClient, connected
from tests.unit.coordinator.api.test_tenants import clock, tenants, usage

__all__ = ["clock", "tenants", "usage"]  # fixtures
MODELS = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"


class Client:
    """A connection."""

    def __init__(self) -> None:
        self.is_away = False

    def turn_away(self) -> None:
        self.is_away = True


def taken(places: Places, address: str, num: int) -> list[Client]:
    clients = [Client() for _ in range(num)]
    assert all(places.take(client, address) for client in clients)
    return clients


def away(clients: list[Client]) -> list[bool]:
    return [client.is_away for client in clients]


def test_an_address_without_a_key_loses_its_oldest_connection() -> None:
    places = Places(16, need_keys=True)
    others = taken(places, "10.0.0.1", 2)
    mine = taken(places, "10.0.0.2", 3)
    assert away(others) == [False, False]
    assert away(mine) == [True, False, False]
    assert len(places) == 4
    places.leave(mine[0])  # when it is lost
    assert len(places) == 4


def test_a_connection_with_a_key_is_its_tenants() -> None:
    places = Places(16, need_keys=True)
    mine = []
    for _ in range(8):  # say, all through one proxy
        (client,) = taken(places, "10.0.0.1", 1)
        places.identify(client, "acme")
        places.identify(client, "acme")
        mine.append(client)
    (ninth,) = taken(places, "10.0.0.1", 1)
    with pytest.raises(Overloaded, match="8 connections, half of all"):
        places.identify(ninth, "acme")
    places.identify(ninth, "friend")
    assert not any(away([*mine, ninth]))
    for client in [*mine, ninth]:
        places.leave(client)
    assert len(places) == 0


@pytest.mark.parametrize(
    ("first", "second", "are_one"),
    [
        ("2001:db8:1:2::1", "2001:db8:1:2:ffff::2", True),
        ("2001:db8:1:2::1", "2001:db8:1:3::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "", True),
    ],
)
def test_addresses_that_one_client_may_choose_count_as_one(
    first: str, second: str, are_one: bool
) -> None:
    places = Places(8, need_keys=True)
    (client,) = taken(places, first, 1)
    taken(places, second, 1)
    assert client.is_away == are_one


def test_without_keys_only_the_total_counts() -> None:
    places = Places(3, need_keys=False)
    clients = taken(places, "127.0.0.1", 3)
    assert not places.take(Client(), "127.0.0.1")
    assert not any(away(clients))
    places.leave(clients[0])
    assert places.take(Client(), "127.0.0.1")


async def asks(client: RawClient, key: str) -> bytes:
    client.writer.write(MODELS.format(key=key).encode())
    return await client.reader.readuntil(b"]}")


async def test_who_holds_connections_without_a_key_keeps_nobody_out(tenants: Tenants) -> None:
    async with served(tenants=tenants, max_connections=16) as api, AsyncExitStack() as stack:
        stays = await stack.enter_async_context(connected(api))
        async with asyncio.timeout(30):
            assert b"HTTP/1.1 200" in await asks(stays, "friend")
            flood = [await stack.enter_async_context(connected(api)) for _ in range(40)]
            for client in flood[:38]:
                assert await client.read_until_broken() == b""
            new = await stack.enter_async_context(connected(api))
            assert b"HTTP/1.1 200" in await asks(new, "friend")
            assert b"HTTP/1.1 200" in await asks(stays, "friend")


async def test_a_request_has_no_more_than_so_many_bytes_of_headers() -> None:
    async with served() as api, connected(api) as client, asyncio.timeout(30):
        client.writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n")
        for i in range(20):
            client.writer.write(f"X-{i}: {'x' * 8000}\r\n".encode())
        assert b"HTTP/1.1 431" in await client.read_until_broken()
        assert await still_serves(api)


async def still_serves(api: Harness) -> bool:
    async with api.client.get("/version") as response:
        return response.status == 200
