"""Prefixes that move: from one prefill node to another, and to the host tier and back."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.settings.prefixes import PrefixConfig
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, assert_free, fleet_config, poll, running

PROMPT = 2000  # tokens
REUSABLE = 1984  # of these: the full blocks before the last token
FILLERS = count()  # no two alike: a filler that is cached keeps nobody busy
FILLER = 30_000  # tokens of a prompt that keeps a node busy for as long as a test needs it


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def twins(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """Two prefill nodes that pull prefixes whenever they can, and wait long for them."""
    config = fleet_config(
        tiny_checkpoint,
        prefill=2,
        prefix=PrefixConfig(prefix_pull="always"),
        timeouts={"prefix_s": 30.0},
    )
    async with running(Fleet(config)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(twins: Fleet) -> AsyncIterator[Client]:
    await twins.restore()
    await twins.wait_back()
    async with Client(twins.url) as client:
        yield client
    await twins.assert_baseline()


@asynccontextmanager
async def busy(fleet: Fleet, client: Client, node: str) -> AsyncIterator[None]:
    """The router has the node down for a long prompt: the next one goes to the other node."""
    await reported_idle(fleet)
    filler = Follower(client, make_prompt(FILLER, next(FILLERS)), 1)
    try:
        await fleet.wait_for(node, lambda gauges: gauges["queue_tokens"] > PROMPT)
        yield
    finally:
        await filler.hang_up()


async def prefilled(fleet: Fleet, client: Client, prompt: list[int]) -> str:
    """The one node that now holds the prompt's KV: a single token needs no handoff."""
    await reported_idle(fleet)
    return (await client.complete(prompt, 1)).prefill_node or ""


async def reported_idle(fleet: Fleet) -> None:
    """Until the router knows that nobody has anything to do: then it takes the same node again."""

    async def look() -> bool:
        return not any(node.queued_tokens for node in (await fleet.status()).nodes)

    await poll(look, 10.0, lambda: "not all nodes are idle")


def other(node: str) -> str:
    return {"prefill-0": "prefill-1", "prefill-1": "prefill-0"}[node]


async def test_a_prefix_is_pulled_from_the_node_that_has_it(twins: Fleet, client: Client) -> None:
    prompt = make_prompt(PROMPT, "pulled")
    expected = await client.complete(prompt, 8, cache_salt="alone")
    holder = await prefilled(twins, client, prompt)
    puller = other(holder)
    before = await twins.gauges(puller)
    async with busy(twins, client, holder):
        second = await client.complete(prompt, 8)
        after = await twins.gauges(puller)
    assert second.prefill_node == puller
    assert second.num_cached_tokens == REUSABLE
    assert second.tokens == expected.tokens
    assert after["prefix_tokens"] - before["prefix_tokens"] == REUSABLE
    assert (await twins.gauges(holder))["prefix_exported_blocks"] >= REUSABLE // 16


async def test_an_answer_is_pulled_from_the_node_that_decoded_it(
    twins: Fleet, client: Client
) -> None:
    """A conversation goes on: what was said last is only where it was decoded."""
    prompt = make_prompt(200, "conversation")
    answer = await client.complete(prompt, 60)
    follow_up = prompt + answer.tokens + make_prompt(5, "next")
    expected = await client.complete(follow_up, 8, cache_salt="alone")
    output = await client.complete(follow_up, 8)
    assert output.tokens == expected.tokens
    # The last of the 60 tokens has no KV anywhere: 259 tokens were computed, 16 whole blocks.
    assert output.num_cached_tokens == 256


async def test_a_source_that_dies_costs_nothing_but_time(twins: Fleet, client: Client) -> None:
    prompt = make_prompt(PROMPT, "lost")
    expected = await client.complete(prompt, 8, cache_salt="alone")
    holder = await prefilled(twins, client, prompt)
    puller = other(holder)
    before = await twins.gauges(puller)
    async with busy(twins, client, holder):
        twins.send_signal(holder, signal.SIGSTOP)
        request = Follower(client, prompt, 8)
        await twins.wait_for(puller, lambda gauges: gauges["waiting_requests"] == 1)
        await twins.kill_node(holder)
        output = await request.end()
    assert output.prefill_node == puller
    assert output.tokens == expected.tokens
    assert output.num_cached_tokens == 0
    after = await twins.gauges(puller)
    assert after["prefix_failed"] - before["prefix_failed"] == 1
    assert after["prefix_tokens"] == before["prefix_tokens"]


@pytest.mark.long  # in one process it does by default
async def test_a_client_that_goes_while_its_prefix_is_fetched(twins: Fleet, client: Client) -> None:
    prompt = make_prompt(PROMPT, "given up")
    holder = await prefilled(twins, client, prompt)
    async with busy(twins, client, holder):
        twins.send_signal(holder, signal.SIGSTOP)
        try:
            request = Follower(client, prompt, 8)
            await twins.wait_for(other(holder), lambda gauges: gauges["waiting_requests"] == 1)
            await request.hang_up()
            await assert_free([(await twins.metrics_addresses())[other(holder)]])
        finally:
            twins.send_signal(holder, signal.SIGCONT)


# ---- the host tier -----------------------------------------------------------------------------


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tiered(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """One node that prefills and decodes: a pool of 64 blocks, and a tier of 512."""
    config = fleet_config(
        tiny_checkpoint,
        mode="colocated",
        engine={"max_model_len": 384, "kv_memory": "256KiB"},
        prefix=PrefixConfig(tier_memory="2MiB", prefix_pull="always"),
    )
    async with running(Fleet(config)) as fleet:
        yield fleet


async def test_an_evicted_prompt_comes_back_from_the_host_tier(tiered: Fleet) -> None:
    prompts = [make_prompt(300, seed) for seed in range(8)]  # 19 blocks each
    async with Client(tiered.url) as client:
        expected = []
        for prompt in prompts:
            expected.append(await client.complete(prompt, 8))
            # It is copied when nobody uses it any more; a prompt that came at once would evict it.
            num_blocks = 18 * len(expected)
            await tiered.wait_for("decode-0", lambda g, n=num_blocks: g["tier_held_blocks"] >= n)
        assert all(output.num_cached_tokens == 0 for output in expected)
        for prompt, before in zip(prompts, expected, strict=True):
            again = await client.complete(prompt, 8)
            assert again.num_cached_tokens == 288
            assert again.tokens == before.tokens
        gauges = await tiered.gauges("decode-0")
        assert gauges["prefix_tier_tokens"] >= 7 * 288
        assert gauges["tier_loaded"] >= 7 * 18
        await asyncio.gather(*(client.complete(prompt, 8) for prompt in prompts))
