"""Coordinators come late, come twice, die and come back; the nodes outlive all of it.

One prefill and one decode node, told of two coordinators. The second one is started by the tests.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from pdserve.cluster.plan import COORDINATOR
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import (
    HEARD_S,
    Fleet,
    SecondCoordinator,
    assert_free,
    fleet_config,
    running,
)

NODES = ("prefill-0", "decode-0")
STREAMED = 300
LONG = 12_000


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(tiny_checkpoint: Path) -> AsyncIterator[SecondCoordinator]:
    """Not started yet."""
    coordinator = SecondCoordinator(tiny_checkpoint)
    yield coordinator
    coordinator.release_ports()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tiny_checkpoint: Path, second: SecondCoordinator) -> AsyncIterator[Fleet]:
    both = [f"--coordinators={second.grpc_address}"]
    config = fleet_config(tiny_checkpoint, engine={"token_budget": 64})
    async with running(Fleet(config, dict.fromkeys(NODES, both))) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(pair: Fleet) -> AsyncIterator[Client]:
    await pair.assert_baseline()
    async with Client(pair.url) as client:
        yield client
    await pair.assert_baseline()


async def test_two_coordinators_share_the_nodes(
    pair: Fleet, client: Client, second: SecondCoordinator
) -> None:
    """The second one is started when the nodes have long been looking for it; then it is killed."""
    expected = (await client.complete(make_prompt(30), STREAMED)).tokens
    async with second, Client(second.url) as other:
        await second.wait_ready(NODES)
        mine = Follower(client, make_prompt(30), STREAMED)
        theirs = Follower(other, make_prompt(30), STREAMED)
        assert (await mine.end()).tokens == (await theirs.end()).tokens == expected

        mine = Follower(client, make_prompt(30), STREAMED)
        doomed = [Follower(other, make_prompt(30, i), 5000) for i in range(3)]
        await asyncio.gather(*(f.reached(3) for f in (mine, *doomed)))
        doomed.append(Follower(other, make_prompt(LONG), 5000))  # in its prompt, or not far beyond
        second.child.send_signal(signal.SIGKILL)
        for follower in doomed:
            assert (await follower.end(HEARD_S)).is_broken
        assert (await mine.end()).tokens == expected
        await pair.assert_baseline()
    async with second, Client(second.url) as other:  # on the same ports
        await second.wait_ready(NODES)
        assert (await other.complete(make_prompt(30), STREAMED)).tokens == expected


async def test_without_its_coordinator_a_node_frees_everything_and_waits(
    pair: Fleet, client: Client
) -> None:
    incarnations = {node.node_id: node.incarnation for node in (await pair.status()).nodes}
    addresses = await pair.metrics_addresses()
    decoding = [Follower(client, make_prompt(30, i), 5000) for i in range(3)]
    await asyncio.gather(*(follower.reached(3) for follower in decoding))
    pair.send_signal("decode-0", signal.SIGSTOP)  # so KV that is there stays where it is
    prefilling = Follower(client, make_prompt(LONG, "coordinator"), 5)
    await pair.wait_for("prefill-0", lambda gauges: gauges["pinned_blocks"] > 0)
    await pair.kill_node(COORDINATOR)
    pair.send_signal("decode-0", signal.SIGCONT)
    for follower in (*decoding, prefilling):
        assert (await follower.end(HEARD_S)).is_broken
    await assert_free(addresses.values())
    await pair.restart_coordinator()
    nodes = (await pair.status()).nodes
    assert {node.node_id: node.incarnation for node in nodes} == incarnations
    assert len((await client.complete(make_prompt(30), 20)).tokens) == 20
