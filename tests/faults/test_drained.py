"""SIGTERM under load: everything that was accepted ends well, and the process ends with code 0."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.commands.cluster.scrape import scrape
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower, Output
from tests.cluster.fleet import HEARD_S, Fleet, fleet_config, poll, running
from tests.cluster.forked import ForkedChild
from tests.matrix import matrix

STREAMED = 2500
LONG = 12_000


@pytest_asyncio.fixture(loop_scope="session", params=matrix([ForkedChild, Child], 1))
async def quartet(request: pytest.FixtureRequest, tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """Also not forked, since how Python ends is part of it."""
    config = fleet_config(tiny_checkpoint, prefill=2, decode=2, engine={"token_budget": 64})
    async with running(Fleet(config, make_child=request.param)) as fleet:
        yield fleet


class Load:
    """Short requests one after the other, from several clients at once, until stopped."""

    def __init__(self, client: Client, num_clients: int) -> None:
        self.outputs: list[Output] = []
        self._client = client
        self._is_over = False
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(num_clients)]

    async def stop(self) -> list[Output]:
        self._is_over = True
        await asyncio.gather(*self._tasks)
        return self.outputs

    async def _run(self, number: int) -> None:
        count = 0
        while not self._is_over:
            count += 1
            prompt = make_prompt(40, (number, count))
            self.outputs.append(await self._client.complete(prompt, 8))


async def wait_left(fleet: Fleet, name: str) -> None:
    """Until nothing new is given to this node: it drains, or it is gone already."""

    async def look() -> bool:
        node = (await fleet.status()).node(name)
        return node is None or node.state == "draining"

    await poll(look, HEARD_S, lambda: f"{name} does not drain")


async def test_every_process_drains_under_load(quartet: Fleet) -> None:
    """A node of either pool, then the coordinator, then the rest: in one cluster, to save time."""
    async with Client(quartet.url) as client:
        await nodes_drain(quartet, client)
        await coordinator_drains(quartet, client)
    for end in await asyncio.gather(*(quartet.drain_node(n) for n in ("prefill-1", "decode-1"))):
        assert end.returncode == 0, f"{end.name}: {end.cause}, {end.last_line}"


async def nodes_drain(fleet: Fleet, client: Client) -> None:
    """Streams move to the nodes that stay, so nobody waits for their end."""
    expected = (await client.complete(make_prompt(30, 0), STREAMED)).tokens
    streams = [Follower(client, make_prompt(30, 0), STREAMED) for _ in range(4)]
    await asyncio.gather(*(follower.reached(3) for follower in streams))
    prompts = [Follower(client, make_prompt(LONG, i), 5) for i in range(4)]
    for name in ("prefill-0", "decode-0"):
        await fleet.wait_for(name, lambda gauges: gauges["legs"] > 0)
    load = Load(client, 4)
    draining = {n: asyncio.create_task(fleet.drain_node(n)) for n in ("prefill-0", "decode-0")}
    for name in draining:
        await wait_left(fleet, name)
    during = await asyncio.gather(*(client.complete(make_prompt(20, i), 5) for i in range(4)))
    for output in during:
        assert output.tokens
        assert (output.prefill_node, output.decode_node) == ("prefill-1", "decode-1")
    for name, task in draining.items():
        end = await task
        assert end.returncode == 0, f"{name}: {end.cause}, {end.last_line}"
    for output in await load.stop():
        assert len(output.tokens) == 8
    for follower in prompts:
        assert len((await follower.end()).tokens) == 5
    outputs = [await follower.end() for follower in streams]
    assert [output.tokens for output in outputs] == [expected] * 4
    began_there = sum(output.decode_node == "decode-0" for output in outputs)
    moves = await scrape(fleet.url.removeprefix("http://"))
    assert moves["pdserve_request_move_seconds_count"] >= began_there > 0, "it waited for their end"
    assert {n.node_id for n in (await fleet.status()).nodes} == {"prefill-1", "decode-1"}


async def coordinator_drains(fleet: Fleet, client: Client) -> None:
    streams = [Follower(client, make_prompt(30, i), STREAMED) for i in range(3)]
    await asyncio.gather(*(follower.reached(3) for follower in streams))
    metrics = await fleet.metrics_addresses()
    fleet.send_signal(COORDINATOR, signal.SIGTERM)

    async def refuses() -> bool:
        try:
            return (await client.complete(make_prompt(5), 1)).status == 503
        except aiohttp.ClientConnectionError:
            return True

    await poll(refuses, HEARD_S, lambda: "a draining coordinator takes requests")
    for follower in streams:
        assert len((await follower.end()).tokens) == STREAMED
    end = await fleet.drain_node(COORDINATOR)
    assert end.returncode == 0, end
    assert set(metrics) == {"prefill-1", "decode-1"}
