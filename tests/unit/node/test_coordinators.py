"""A node's links to coordinators that are found by name, over real gRPC on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from pdserve.node.coordinator_link import CoordinatorLink
from pdserve.node.coordinators import Coordinators, look_up
from pdserve.protocol import LoadReport, NodeHello, NodeRole, NodeState
from tests.unit.node.test_membership import TIMEOUTS, Coordinator, Receiver, hello
from tests.waits import until

NAME = "coordinators:8001"


class Names:
    """A name server that knows one name."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        self.num_asked = 0

    async def look_up(self, address: str) -> list[str]:
        self.num_asked += 1
        if not self.addresses:
            raise OSError(f"nobody knows {address}")
        return self.addresses


@pytest.fixture
def names() -> Names:
    return Names()


class Node:
    """What a node's runtime has of its links."""

    def __init__(self, names: Names) -> None:
        self.links: list[CoordinatorLink] = []
        self.num_hellos = 0
        self.coordinators = Coordinators(
            self.links, [NAME], self._make_link, names.look_up, every_s=0.02
        )

    def _make_link(self, address: str) -> CoordinatorLink:
        load = LoadReport(state=NodeState.READY, role=NodeRole.DECODE)
        return CoordinatorLink(address, self._hello, lambda: load, Receiver(), TIMEOUTS)

    def _hello(self) -> NodeHello:
        self.num_hellos += 1
        attached_to = [link.coordinator for link in self.links if link.is_attached]
        return replace(hello(), attached_to=attached_to)


class Draining:
    """A link, to a coordinator that takes a while to see that the node drains."""

    is_attached = True

    def __init__(self, address: str) -> None:
        self.address = address
        self.is_waited_for, self.is_seen = asyncio.Event(), asyncio.Event()

    async def wait_drain_seen(self) -> None:
        self.is_waited_for.set()
        await self.is_seen.wait()

    async def leave(self) -> None:
        """Nothing is queued."""


@asynccontextmanager
async def running_node(names: Names) -> AsyncIterator[Node]:
    node = Node(names)
    try:
        yield node
    finally:
        await node.coordinators.leave()
        await node.coordinators.wait_left(1.0)


async def listening(incarnation: str, *hosts: str) -> tuple[Coordinator, list[str]]:
    """A coordinator, and an address of it on each of these hosts."""
    coordinator = Coordinator(incarnation=incarnation)
    grpc = coordinator.server.grpc
    others = [f"{host}:{grpc.add_insecure_port(f'{host}:0')}" for host in hosts]
    await coordinator.start()
    return coordinator, [f"127.0.0.1:{coordinator.port}", *others]


async def test_a_second_address_of_a_coordinator_is_left_alone(
    names: Names, caplog: pytest.LogCaptureFixture
) -> None:
    """Each stream used to replace the other, for ever."""
    coordinator, addresses = await listening("1", "127.0.0.2")
    names.addresses = addresses[:1]
    async with running_node(names) as node:
        await until(coordinator.flow.is_ready)
        (member,) = coordinator.registry
        names.addresses = addresses
        await until(lambda: node.num_hellos >= 4)
        assert list(coordinator.registry) == [member], "the first stream was never touched"
        assert [link.is_attached for link in node.links] == [True, False]
        assert caplog.text.count("by another of its addresses: one is enough") == 1
        names.addresses = addresses[1:]
        first = node.links[0]
        assert first._stream is not None
        first._stream.cancel()
        await until(lambda: [link.address for link in node.links] == addresses[1:])
        await until(coordinator.flow.is_ready)
    await coordinator.server.stop(0)


async def test_both_addresses_at_once_come_to_rest(names: Names) -> None:
    coordinator, names.addresses = await listening("1", "127.0.0.2")
    async with running_node(names) as node:
        await until(lambda: node.num_hellos >= 5)
        (member,) = coordinator.registry
        num_hellos = node.num_hellos
        await until(lambda: node.num_hellos >= num_hellos + 2)
        assert list(coordinator.registry) == [member]
        assert sum(link.is_attached for link in node.links) == 1
    await coordinator.server.stop(0)


async def test_links_follow_the_name(names: Names, caplog: pytest.LogCaptureFixture) -> None:
    one, of_one = await listening("1")
    two, of_two = await listening("2")
    async with running_node(names) as node:
        await until(lambda: names.num_asked >= 3)
        assert not node.links
        assert caplog.text.count("cannot be looked up: nobody knows") == 1
        names.addresses = of_one
        await until(one.flow.is_ready)
        names.addresses = of_two
        await until(two.flow.is_ready)
        assert one.flow.is_ready(), "who drains has lost its name, but still has requests here"
        names.addresses = []
        await one.server.stop(0)
        asked = names.num_asked
        await until(lambda: names.num_asked >= asked + 2)
        assert len(node.links) == 2, "nothing is dropped while nobody knows the name"
        names.addresses = of_two
        await until(lambda: [link.address for link in node.links] == of_two)
        assert two.flow.is_ready()
    await two.server.stop(0)


async def test_looking_up() -> None:
    for numeric in ("10.0.0.1:8001", "[fd00::1]:8001"):
        assert await look_up(numeric) == [numeric]
    assert "127.0.0.1:8001" in await look_up("localhost:8001")


async def test_a_drain_waits_for_each_coordinator_even_if_one_is_dropped_meanwhile(
    names: Names,
) -> None:
    """The one after it in the list used to be left out."""
    first, second = (Draining(f"127.0.0.1:{port}") for port in (1, 2))
    links: list[Any] = [first, second]
    coordinators = Coordinators(links, [NAME], lambda _: links[0])  # nobody knows the name now
    draining = asyncio.create_task(coordinators.wait_drain_seen())
    await first.is_waited_for.wait()
    links.remove(first)
    first.is_seen.set()
    async with asyncio.timeout(30):
        await second.is_waited_for.wait()
    assert not draining.done()
    second.is_seen.set()
    await draining
    await coordinators.leave()


async def test_numbers_are_not_looked_up_again() -> None:
    asked: list[str] = []

    async def resolve(address: str) -> list[str]:
        asked.append(address)
        return [address]

    def make_link(address: str) -> CoordinatorLink:
        load = LoadReport(state=NodeState.READY, role=NodeRole.DECODE)
        return CoordinatorLink(address, hello, lambda: load, Receiver(), TIMEOUTS)

    links: list[CoordinatorLink] = []
    addresses = ["127.0.0.1:1", "[::1]:1"]
    numbers = Coordinators(links, addresses, make_link, resolve, every_s=0.001)
    again: list[str] = []

    async def resolve_name(address: str) -> list[str]:
        again.append(address)
        return []

    names = Coordinators([], [NAME], make_link, resolve_name, every_s=0.001)
    await until(lambda: len(again) > 5)
    assert asked == addresses
    assert [link.address for link in links] == addresses
    for coordinators in (numbers, names):
        await coordinators.leave()
        await coordinators.wait_left(0.0)
