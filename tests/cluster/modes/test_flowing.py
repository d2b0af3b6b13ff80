"""Flowing mode with real processes: streams flow with their very tokens, and survive their nodes.

The profile of a tiny model on a busy machine says little about who would be late. So here one class
is promised what no node can keep: its streams leave a prefill node as soon as there is a decode
node. The other one is promised nothing, and its streams stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from pdserve.commands.simulation.call import Call
from pdserve.commands.simulation.cluster import Cluster
from pdserve.commands.simulation.coordinator import Coordinator
from pdserve.commands.simulation.events import Events
from pdserve.commands.simulation.node import Node
from pdserve.protocol import NodeRole, Prompt, Slo
from pdserve.settings.config import PolicyConfig, RoutingConfig
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.simulation.machines import ONE_CORE_25M

CLASSES = ["loose", "tight tpot=0.00001"]
LENGTHS = (1, 15, 16, 38, 333, 1500)
NUM_OUTPUT = 12
STREAMED = 30_000  # more than is waited for


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    routing = RoutingConfig(slo_classes=CLASSES, default_class="loose", admission=False)
    engine = {"token_budget": 37, "max_model_len": 32768}
    config = fleet_config(tiny_checkpoint, mode="flowing", engine=engine, routing=routing)
    async with running(Fleet(config)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(fleet.url) as client:
        yield client
    await fleet.assert_baseline(within_s=20.0)


@pytest.mark.long  # streams that flow have them by default
async def test_tokens_are_those_of_transformers(client: Client, tiny_checkpoint: Path) -> None:
    reference = Reference(tiny_checkpoint)
    outputs = await asyncio.gather(
        *(
            client.complete(make_prompt(length), NUM_OUTPUT, slo_class=name, cache_salt=name)
            for length in LENGTHS
            for name in ("loose", "tight")
        )
    )
    for output, length in zip(outputs, (n for n in LENGTHS for _ in range(2)), strict=True):
        assert output.tokens == reference.greedy(make_prompt(length), NUM_OUTPUT), length


def simulated(name: str) -> str:
    """Which node decodes the first stream of a class, by the simulator."""
    events, nodes = Events(), dict[str, str]()

    class Watched(Cluster):
        def dispatch(self, call: Call, prefill: Node | None, decode: Node | None, *rest: Any,
                     **fields: Any) -> None:  # fmt: skip
            assert decode is not None
            nodes[call.kind] = decode.name
            super().dispatch(call, prefill, decode, *rest, **fields)

    roles = {"prefill-0": NodeRole.PREFILL, "decode-0": NodeRole.DECODE}
    cluster = Watched(
        events, [Node(n, r, ONE_CORE_25M, events, PolicyConfig()) for n, r in roles.items()]
    )
    slo = Slo(name=name, tpot_s=0.00001)
    call = Call(name, 0.0, Prompt([1] * 100), 1000, slo, kind=name)  # token 0 would end it
    cluster.run(Coordinator(cluster, "flowing"), [call], lambda _: None)
    return nodes[name]


async def test_streams_outlive_the_decode_node_and_those_at_risk_flow_to_the_next_one(
    fleet: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    prompts = {name: make_prompt(100, name) for name in ("loose", "tight")}
    streams = {}
    for name in ("tight", "loose"):
        streams[name] = Follower(client, prompts[name], STREAMED, slo_class=name)
        await streams[name].reached(3)
    # Where the loose one begins is nothing to rely on: to a tiny model, both nodes are as good.
    assert streams["tight"].output.decode_node == simulated("tight") == "decode-0"
    await fleet.kill_node("decode-0")
    await fleet.wait_for("prefill-0", lambda gauges: gauges["running_requests"] == 2)
    await fleet.start_node("decode-0")
    await fleet.wait_back()
    await fleet.wait_for("decode-0", lambda gauges: gauges["running_requests"] == 1)
    await fleet.wait_for("prefill-0", lambda gauges: gauges["running_requests"] == 1)
    reference = Reference(tiny_checkpoint)
    for name in ("loose", "tight"):
        stream = streams[name]
        num_tokens = len(stream.output.token_ids)
        await stream.reached(num_tokens + 20)  # also from where it is now
        await stream.hang_up()
        assert reference.is_greedy(prompts[name], stream.output.token_ids), name
        if name == "loose":  # it was the one that stayed
            await fleet.wait_for("prefill-0", lambda gauges: gauges["running_requests"] == 0)
            await fleet.wait_for("decode-0", lambda gauges: gauges["running_requests"] == 1)
