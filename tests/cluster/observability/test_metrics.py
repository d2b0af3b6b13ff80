"""What the processes say about themselves, under load and afterwards."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import SETTLE_S, Fleet, poll, read_gauges


@pytest.mark.long
async def test_metrics_can_be_read_all_the_time(fleet: Fleet, client: Client) -> None:
    """Gauges are computed while they are read, from queues that change with every message."""
    urls = [f"http://{address}/metrics" for address in (await fleet.metrics_addresses()).values()]
    urls += [f"{fleet.url}/metrics", f"{fleet.url}/status"]
    is_over = False
    statuses: list[int] = []

    async def scrape(url: str) -> None:
        async with aiohttp.ClientSession() as session:
            while not is_over:
                async with session.get(url) as response:
                    await response.read()
                    statuses.append(response.status)

    scrapers = [asyncio.create_task(scrape(url)) for url in urls]
    for _ in range(4):
        await asyncio.gather(*(client.complete(make_prompt(50 + i), 4) for i in range(40)))
    is_over = True
    await asyncio.gather(*scrapers)
    assert set(statuses) == {200}
    assert len(statuses) > 100


async def test_a_handoff_is_counted_on_both_sides(fleet: Fleet, client: Client) -> None:
    before = {name: await fleet.gauges(name) for name in fleet.node_names}
    output = await client.complete(make_prompt(1000, "counted"), 4)
    assert output.tokens
    after = {name: await fleet.gauges(name) for name in fleet.node_names}

    def grown(name: str, metric: str) -> float:
        return after[name][metric] - before[name][metric]

    decode = output.decode_node or ""
    bytes_per_token = 2 * 2 * 16 * 4  # layers, K and V, head_dim, float32
    assert grown(decode, "pulled_bytes") == 1000 * bytes_per_token
    # One a chunk, but one for all those that were computed before the decode node had subscribed:
    # on a busy machine, many.
    assert 1 <= grown("prefill-0", "tickets_issued") <= 1000 // 37 + 1
    assert grown("prefill-0", "steps") >= 1000 // 37
    assert grown(decode, "steps") == 3


async def test_nodes_follow_how_long_their_steps_really_take(fleet: Fleet, client: Client) -> None:
    output = await client.complete(make_prompt(200, "timed"), 30)
    assert output.tokens
    prefill = await fleet.gauges("prefill-0")
    decode = await fleet.gauges(output.decode_node or "")
    assert prefill["perf_prefill_ratio"] != 1.0 != decode["perf_decode_ratio"]
    assert 0 < prefill["perf_prefill_error"] <= 1
    assert 0 < decode["perf_decode_error"] <= 1


async def test_what_tokens_cost_is_shown_where_nodes_have_prices(
    fleet: Fleet, client: Client
) -> None:
    """One prefill node and two decode nodes; costs are looked at with every heartbeat."""
    await client.complete(make_prompt(300, "paid"), 30)

    async def is_paid() -> bool:
        costs = (await fleet.status()).coordinator.costs
        return costs is not None and {"uncached_input", "output"} <= costs.per_million.keys()

    await poll(is_paid, SETTLE_S, lambda: "no cost of tokens")
    costs = (await fleet.status()).coordinator.costs
    assert costs is not None
    assert costs.per_hour == pytest.approx(4.5), "of the nodes that there are"
    assert 0 < costs.idle_share < 1
    gauges = await read_gauges(fleet.url.removeprefix("http://"))
    assert gauges["cost_per_hour"] == pytest.approx(costs.per_hour, rel=0.1)
