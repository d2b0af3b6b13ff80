"""A decode node with next to no room: requests wait where their KV is, and nothing is lost.

24 blocks of 16 tokens against 512 on the prefill node, where prompts and KV that waits may take 76.
Tickets are good for a quarter of a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.settings.config import HandoffConfig, RoutingConfig
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import SETTLE_S, Fleet, fleet_config, poll, read_gauges, running

PROMPT = 120  # tokens: eight blocks, so two fit
LIMIT = 240  # tokens of output that keep the decode node full for a while
FEW = 8  # requests: more than have room, and soon done
BEGUN = 20  # of many: more than the nodes can hold
MANY = 150  # requests that are not done before a test has seen them wait, however busy the machine


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def narrow(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    engine = {"token_budget": 37, "max_model_len": 384, "kv_memory": "2MiB"}
    config = fleet_config(
        tiny_checkpoint,
        engine=engine,
        handoff=HandoffConfig(pinned_limit=0.15),
        routing=RoutingConfig(
            router="least-loaded",
            admission=False,
            slo_classes=["at-once ttft=60 tpot=1 hold=0", "held ttft=60 tpot=0.005"],
            default_class="at-once",
        ),
        timeouts={"ticket_s": 0.25},
    )
    # Over TCP the exporter looks at every ticket. A greedy node preempts.
    little = ["--kv-memory=96KiB", "--set=policy.kv_headroom=greedy", "--set=policy.watermark=0"]
    flags = {"decode-0": [*little, "--transports=tcp"]}
    async with running(Fleet(config, flags)) as fleet:
        assert (await fleet.gauges("decode-0"))["blocks"] == 24
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(narrow: Fleet) -> AsyncIterator[Client]:
    await narrow.restore()
    await narrow.assert_baseline()
    async with Client(narrow.url) as client:
        yield client
    await narrow.assert_baseline()


async def fill(narrow: Fleet, client: Client) -> list[Follower]:
    """Requests of which two or three decode, and three others' KV waits on the prefill node."""
    followers = [Follower(client, make_prompt(PROMPT, i), LIMIT) for i in range(MANY)]
    await all_placed(narrow, followers)
    await narrow.wait_for("decode-0", lambda gauges: gauges["waiting_requests"] >= 3)
    await narrow.wait_for("prefill-0", lambda gauges: gauges["pinned_blocks"] >= 8 * 3)
    return followers


async def all_placed(narrow: Fleet, followers: list[Follower]) -> None:
    """None is still to come: a request that came while a pool is empty would be refused."""
    num_placed = 0

    async def look() -> bool:
        nonlocal num_placed
        num_ended = sum(follower.output.is_done for follower in followers)  # as seen before
        num_placed = num_ended + (await narrow.status()).inflight
        return num_placed == len(followers)

    await poll(look, SETTLE_S, lambda: f"{num_placed} of {len(followers)} have been placed")


async def assert_whole(followers: list[Follower]) -> None:
    """A node has died; no answer has. Those that have not begun are not needed for that."""
    for follower in followers[BEGUN:]:
        await follower.hang_up()
    outputs = await asyncio.gather(*(follower.end() for follower in followers[:BEGUN]))
    assert [len(output.tokens) for output in outputs] == [LIMIT] * BEGUN


@pytest.mark.long  # it is simulated by default
async def test_kv_that_waits_keeps_new_prompts_out(narrow: Fleet, client: Client) -> None:
    followers = [Follower(client, make_prompt(PROMPT, i), LIMIT) for i in range(MANY)]
    gauges = await narrow.wait_for("prefill-0", lambda gauges: gauges["throttled"] == 1)
    assert gauges["pinned_blocks"] <= 0.15 * gauges["blocks"]
    await narrow.wait_for("decode-0", lambda gauges: gauges["room_waiting_requests"] > 0)
    for follower in followers:
        await follower.hang_up()
    await narrow.wait_for("prefill-0", lambda gauges: gauges["throttled"] == 0)
    assert (await narrow.gauges("prefill-0"))["throttled_seconds"] > 0


async def test_requests_wait_their_turn_and_all_are_exact(
    narrow: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    """Tickets that expire meanwhile are renewed."""
    before = await narrow.gauges("decode-0")
    followers = [Follower(client, make_prompt(PROMPT, i), LIMIT) for i in range(FEW)]
    outputs = [(await follower.end()).tokens for follower in followers]
    after = await narrow.gauges("decode-0")
    assert after["ticket_renewals"] > before["ticket_renewals"]
    reference = Reference(tiny_checkpoint)
    for i, tokens in enumerate(outputs):
        assert len(tokens) == LIMIT
        assert reference.is_greedy(make_prompt(PROMPT, i), tokens)


@pytest.mark.long  # one that is held back is by default
async def test_token_one_does_not_wait_for_room(narrow: Fleet, client: Client) -> None:
    followers = await fill(narrow, client)
    for follower in followers[:FEW]:
        await follower.reached(1)
    assert (await narrow.gauges("decode-0"))["waiting_requests"] > 0
    for follower in followers:
        await follower.hang_up()


@pytest.mark.long  # it is simulated by default
async def test_token_one_is_held_back_if_its_class_says_so(
    narrow: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    others = await fill(narrow, client)
    prompts = [make_prompt(PROMPT, 100 + i) for i in range(3)]
    followers = [Follower(client, prompt, 8, slo_class="held") for prompt in prompts]
    outputs = [(await follower.end()).tokens for follower in followers]
    reference = Reference(tiny_checkpoint)
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert len(tokens) == 8
        assert reference.is_greedy(prompt, tokens)
    metrics = await read_gauges(narrow.url.removeprefix("http://"))
    assert metrics["token_one_held_seconds_count"] >= 1
    for follower in others:
        await follower.hang_up()


async def test_preempted_requests_are_exact(
    narrow: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    before = (await narrow.gauges("decode-0"))["preemptions"]
    prompts = [make_prompt(20, seed) for seed in range(6)]
    greedy, seeded = await asyncio.gather(
        asyncio.gather(*(client.complete(prompt, 150) for prompt in prompts)),
        asyncio.gather(
            *(client.complete(prompt, 150, temperature=1.0, seed=3) for prompt in prompts)
        ),
    )
    after = (await narrow.gauges("decode-0"))["preemptions"]
    assert after > before, "nothing was preempted"
    reference = Reference(tiny_checkpoint)
    for prompt, output in zip(prompts, greedy, strict=True):
        assert len(output.tokens) == 150
        assert reference.is_greedy(prompt, output.tokens)
    for prompt, output in zip(prompts[:2], seeded, strict=False):
        alone = await client.complete(prompt, 150, temperature=1.0, seed=3, cache_salt="alone")
        assert output.tokens == alone.tokens
    assert (await narrow.gauges("decode-0"))["preemptions"] == after


@pytest.mark.long  # one that goes at another moment does by default
async def test_a_client_that_goes_while_its_kv_waits(narrow: Fleet, client: Client) -> None:
    followers = await fill(narrow, client)
    await asyncio.gather(*(follower.hang_up() for follower in followers[2:]))
    await narrow.wait_for("prefill-0", lambda gauges: gauges["pinned_blocks"] == 0, SETTLE_S)
    await narrow.wait_for("decode-0", lambda gauges: gauges["waiting_requests"] == 0)
    for follower in followers[:2]:
        assert len((await follower.end()).tokens) == LIMIT


@pytest.mark.long  # nodes are killed at other moments by default
async def test_the_prefill_node_is_killed_while_kv_waits_on_it(
    narrow: Fleet, client: Client
) -> None:
    followers = await fill(narrow, client)
    await asyncio.gather(*(follower.reached(1) for follower in followers[:FEW]))
    await narrow.kill_node("prefill-0")
    # Some were handed off before; the others' KV is computed again where they decode.
    await narrow.start_node("prefill-0")
    await assert_whole(followers)
    assert (await client.complete(make_prompt(50), 5)).tokens


@pytest.mark.long  # as above
async def test_the_decode_node_is_killed_while_kv_waits_for_it(
    narrow: Fleet, client: Client
) -> None:
    followers = await fill(narrow, client)
    await narrow.kill_node("decode-0")
    await narrow.wait_for("prefill-0", lambda gauges: gauges["pinned_blocks"] == 0, SETTLE_S)
    await narrow.start_node("decode-0")
    await assert_whole(followers)
    assert (await client.complete(make_prompt(50), 5)).tokens
