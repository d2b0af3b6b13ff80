"""Nodes killed or frozen at every phase: streams go on elsewhere with their very tokens.

Two prefill nodes and two decode nodes, one of which pulls by TCP; so there is always somebody left
to serve.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.settings.timeouts import Timeouts
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import (
    HEARD_S,
    SETTLE_S,
    Fleet,
    assert_free,
    fleet_config,
    poll,
    running,
)
from tests.matrix import matrix

LIVENESS_S = Timeouts().liveness_s  # the default, as a user has it
PATIENCE_S = 5 * LIVENESS_S  # until a connection counts as dead whose other end is silent
STOPPED_S = 3.5  # for so long at least a paused machine loses nothing
PAUSE_S = 0.2
LONG = 12_000  # tokens of a prompt that takes a while
STREAMED = 500  # tokens of an output that takes a while
NUM_STREAMS = 4

PREFILL = ("prefill-0", "prefill-1")
DECODE = ("decode-0", "decode-1")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def quartet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    config = fleet_config(
        tiny_checkpoint,
        prefill=2,
        decode=2,
        engine={"token_budget": 64},
        timeouts={"heartbeat_s": Timeouts().heartbeat_s, "liveness_s": LIVENESS_S},
    )
    async with running(Fleet(config, {"decode-1": ["--transports=tcp"]})) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def client(quartet: Fleet) -> AsyncIterator[Client]:
    await quartet.restore()
    await quartet.assert_baseline()
    async with Client(quartet.url) as client:
        yield client
    await quartet.assert_baseline()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def undisturbed(quartet: Fleet) -> list[list[int]]:
    """The tokens of `stream(client, i)` when nothing happens."""
    async with Client(quartet.url) as client:
        streams = [stream(client, i) for i in range(NUM_STREAMS)]
        return [(await follower.end()).tokens for follower in streams]


# ---- what every test here needs ----------------------------------------------------------------


def stream(client: Client, seed: object) -> Follower:
    return Follower(client, make_prompt(30, seed), STREAMED)


async def goes_on(follower: Follower) -> None:
    """It has lost its node, and gets further tokens; then its client goes away."""
    output = await follower.reached(len(follower.output.token_ids) + 3)
    assert output.error is None, output
    await follower.hang_up()


async def prefilling(fleet: Fleet, client: Client) -> tuple[Follower, str]:
    """A long prompt, and the prefill node that is in the middle of it."""
    follower = Follower(client, make_prompt(LONG, time.monotonic()), 20_000)
    found: list[str] = []

    async def look() -> bool:
        for name in PREFILL:
            gauges = await fleet.gauges(name)
            if 0 < gauges["queue_tokens"] < LONG * 0.9 and gauges["pinned_blocks"] > 0:
                found.append(name)
        return bool(found)

    await poll(look, 20.0, lambda: "no prefill node is prefilling")
    return follower, found[0]


async def assert_all_used(client: Client) -> None:
    """Every node takes its share of new requests, once pairs that have failed are tried again."""
    prefills: set[str | None] = set()
    decodes: set[str | None] = set()

    async def look() -> bool:
        outputs = await asyncio.gather(
            *(client.complete(make_prompt(600, (time.monotonic(), i)), 20) for i in range(6))
        )
        assert all(output.tokens for output in outputs)
        prefills.update(output.prefill_node for output in outputs)
        decodes.update(output.decode_node for output in outputs)
        return prefills == set(PREFILL) and decodes == set(DECODE)

    await poll(look, 20.0, lambda: f"used: {prefills}, {decodes}")


# ---- killed ------------------------------------------------------------------------------------


async def test_prefill_node_killed_in_mid_prompt(
    quartet: Fleet, client: Client, undisturbed: list[list[int]]
) -> None:
    bystanders = [stream(client, i) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(bystander.reached(3) for bystander in bystanders))
    victim, name = await prefilling(quartet, client)
    await quartet.kill_node(name)
    await goes_on(victim)
    after = await client.complete(make_prompt(40), 5)
    assert after.tokens
    assert after.prefill_node != name
    for bystander, expected in zip(bystanders, undisturbed, strict=True):
        assert (await bystander.end()).tokens == expected
    await quartet.assert_baseline()
    await quartet.start_node(name)
    await assert_all_used(client)


@pytest.mark.long  # one is killed before by default
async def test_prefill_node_killed_after_the_handoff(
    quartet: Fleet, client: Client, undisturbed: list[list[int]]
) -> None:
    handed_off = [stream(client, i) for i in range(NUM_STREAMS)]
    for follower in handed_off:
        await follower.reached(3)
    name = handed_off[0].output.prefill_node
    assert name is not None
    await quartet.kill_node(name)
    await quartet.wait_gone(name)
    for follower, expected in zip(handed_off, undisturbed, strict=True):
        assert (await follower.end()).tokens == expected


async def test_decode_node_killed_in_mid_stream(
    quartet: Fleet, client: Client, undisturbed: list[list[int]]
) -> None:
    streams = [stream(client, i) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(follower.reached(5) for follower in streams))
    assert {follower.output.decode_node for follower in streams} == set(DECODE)
    name = "decode-0"
    await quartet.kill_node(name)
    assert [(await follower.end()).tokens for follower in streams] == undisturbed
    after = await client.complete(make_prompt(30, 0), STREAMED)
    assert after.tokens == undisturbed[0]
    assert after.decode_node != name
    await quartet.assert_baseline()
    await quartet.start_node(name)
    await assert_all_used(client)


@pytest.mark.long  # others are killed at other moments by default
async def test_decode_node_killed_while_its_request_is_prefilled(
    quartet: Fleet, client: Client
) -> None:
    """It would have pulled; it has announced itself, and has a part of the KV."""
    victim, prefill_name = await prefilling(quartet, client)
    names: list[str] = []

    async def look() -> bool:
        names[:] = [n for n in DECODE if (await quartet.gauges(n))["legs"]]
        return len(names) == 1

    await poll(look, HEARD_S, lambda: f"not one decode node has its leg: {names}")
    await quartet.kill_node(names[0])
    await goes_on(victim)
    await quartet.wait_for(
        prefill_name, lambda gauges: gauges["pinned_blocks"] == gauges["queue_tokens"] == 0
    )


@pytest.mark.long  # test_restarted.py has it by default
async def test_the_only_nodes_of_a_pool_are_killed_and_come_back(
    quartet: Fleet, client: Client, undisturbed: list[list[int]]
) -> None:
    """Streams wait for a node."""
    streams = [stream(client, i) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(follower.reached(5) for follower in streams))
    await asyncio.gather(*(quartet.kill_node(name) for name in DECODE))
    await quartet.start_node("decode-0")
    assert [(await follower.end()).tokens for follower in streams] == undisturbed


# ---- frozen ------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize("pool", matrix(["decode", "prefill"], 1))
async def test_a_frozen_node_counts_as_lost_until_it_comes_back(
    quartet: Fleet, client: Client, pool: str
) -> None:
    """It does not hang up, and its kernel answers: only its silence gives it away, and late."""
    if pool == "prefill":
        victim, name = await prefilling(quartet, client)
    else:
        victim = stream(client, "frozen")
        name = (await victim.reached(3)).decode_node or ""
    quartet.send_signal(name, signal.SIGSTOP)
    try:
        await quartet.wait_gone(name, PATIENCE_S)  # ticks that come late do not count
        await goes_on(victim)
        await quartet.assert_baseline()  # of those that are left
        after = await client.complete(make_prompt(40), 5)
        assert after.tokens
        assert name not in (after.prefill_node, after.decode_node)
    finally:
        quartet.send_signal(name, signal.SIGCONT)

    await quartet.wait_back()
    await quartet.assert_baseline()
    await assert_all_used(client)


@pytest.mark.long  # those of one that is gone are
async def test_a_frozen_coordinators_legs_are_freed_and_go_on_when_it_is_found_again(
    quartet: Fleet, client: Client
) -> None:
    """To the nodes it is gone, so they free what it asked for; then it asks for it again."""
    addresses = await quartet.metrics_addresses()
    decoding = [Follower(client, make_prompt(30, i), 20_000) for i in range(2)]
    await asyncio.gather(*(follower.reached(3) for follower in decoding))
    prefilling_too, _ = await prefilling(quartet, client)
    quartet.send_signal(COORDINATOR, signal.SIGSTOP)
    try:
        await assert_free(addresses.values(), PATIENCE_S + SETTLE_S)
    finally:
        quartet.send_signal(COORDINATOR, signal.SIGCONT)
    for follower in (*decoding, prefilling_too):
        await goes_on(follower)
    await quartet.wait_back()
    await assert_all_used(client)


@pytest.mark.long
@pytest.mark.parametrize(
    "stopped",
    [pytest.param((COORDINATOR,), marks=pytest.mark.long), (*DECODE, *PREFILL, COORDINATOR)],
    ids=["coordinator", "machine"],
)
async def test_who_was_stopped_does_not_take_its_own_silence_for_others(
    quartet: Fleet, client: Client, undisturbed: list[list[int]], stopped: tuple[str, ...]
) -> None:
    """Beyond the liveness deadline: whoever was there before is there after, and streams go on."""
    streams = [stream(client, i) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(follower.reached(3) for follower in streams))
    quartet.lines.clear()
    for name in stopped:
        quartet.send_signal(name, signal.SIGSTOP)
    await asyncio.sleep(STOPPED_S)  # the pause itself
    for name in reversed(stopped):  # the coordinator first: it has heard nothing yet
        quartet.send_signal(name, signal.SIGCONT)
    assert [(await follower.end()).tokens for follower in streams] == undisturbed
    assert not [line for _, line in quartet.lines if "is gone" in line]


@pytest.mark.long
@pytest.mark.parametrize(
    "pause_s", [PAUSE_S, pytest.param(LIVENESS_S + 0.5, marks=pytest.mark.long)]
)
async def test_pauses_of_one_after_the_other_harm_nobody(
    quartet: Fleet, client: Client, undisturbed: list[list[int]], pause_s: float
) -> None:
    """A process that is not scheduled for a while is late, not lost: its kernel answers."""
    quartet.lines.clear()
    streams = [stream(client, i) for i in range(NUM_STREAMS)]
    await asyncio.gather(*(follower.reached(3) for follower in streams))
    prompt = Follower(client, make_prompt(LONG // 4, time.monotonic()), 20)
    for name in (*DECODE, *PREFILL, COORDINATOR):
        quartet.send_signal(name, signal.SIGSTOP)
        await asyncio.sleep(pause_s)  # the pause itself
        quartet.send_signal(name, signal.SIGCONT)
    assert [(await follower.end()).tokens for follower in streams] == undisturbed
    assert len((await prompt.end()).tokens) == 20
    assert {node.state for node in (await quartet.status()).nodes} == {"ready"}
    assert not [line for _, line in quartet.lines if "is gone" in line]
