"""A prefill node that its peers cannot reach, beside one that they can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio
from msgspec.structs import replace

from pdserve.commands.cli.doctor.cluster.command import diagnose
from pdserve.findings.finding import Level
from pdserve.node.runtime import Node
from pdserve.protocol import NodeHello
from tests.cluster.client import Client, Output
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.cluster.forked import ForkedChild
from tests.cluster.prompts import make_prompt

UNREACHABLE = "prefill-0"
NOBODY = "127.0.0.1:1"  # refuses connections
NUM_REQUESTS = 20
AT_ONCE = 4


def tell_a_wrong_address() -> None:
    """In the node's process: what it tells others is not where it listens."""
    make_hello = Node._hello

    def misleading(self: Node, session_address: str, metrics_address: str) -> NodeHello:
        return replace(make_hello(self, session_address, metrics_address), session_address=NOBODY)

    Node._hello = misleading  # type: ignore[method-assign]


class MisledChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        return tell_a_wrong_address if f"--node-id={UNREACHABLE}" in words else None


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    config = fleet_config(tiny_checkpoint, prefill=2, decode=1)
    async with running(Fleet(config, make_child=MisledChild)) as fleet:
        yield fleet


async def test_requests_are_routed_around_it(fleet: Fleet) -> None:
    async with Client(fleet.url) as client:
        limit = asyncio.Semaphore(AT_ONCE)

        async def served(index: int) -> Output:
            async with limit:
                return await client.complete(make_prompt(100, index), 5)

        outputs = await asyncio.gather(*(served(i) for i in range(NUM_REQUESTS)))
    assert all(len(output.tokens) == 5 for output in outputs)
    node = (await fleet.status()).node(UNREACHABLE)
    assert node is not None
    assert [(f.peer, f.error) for f in node.failing] == [("decode-0", "peer_lost")]
    told = [f.what for f in await diagnose([fleet.url]) if f.level is Level.PROBLEM]
    assert len(told) == 1
    assert told[0].startswith("decode-0 gets no KV from prefill-0 (peer_lost")
