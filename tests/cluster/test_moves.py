"""Live migration with real processes: streams are taken over while they run, whatever they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.matrix import matrix

STREAMED = 2000
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 3},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.7, "seed": 3},
    {"guided_regex": "([a-m]{10}-){200}", "ignore_eos": False},
)
LENGTHS = (3, 16, 333)  # of prompts: less than a block, one, and many
ALL = [(make_prompt(length), kind) for length in LENGTHS for kind in KINDS]
EACH = [(make_prompt(LENGTHS[number % 3]), kind) for number, kind in enumerate(KINDS)]


@pytest_asyncio.fixture(loop_scope="session")
async def pair(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """Two nodes that hand no prompts off: what one takes from the other are streams."""
    config = fleet_config(tiny_checkpoint, mode="colocated", decode=2)
    async with running(Fleet(config)) as fleet:
        yield fleet


@pytest.mark.parametrize("requests", matrix([EACH, ALL], 1), ids=["each", "all"])
async def test_streams_of_all_kinds_are_taken_over(
    pair: Fleet, requests: list[tuple[list[int], dict[str, Any]]]
) -> None:
    async with Client(pair.url) as client:
        expected = await asyncio.gather(
            *(client.stream_all(prompt, STREAMED, **kind) for prompt, kind in requests)
        )
        followers = [Follower(client, prompt, STREAMED, **kind) for prompt, kind in requests]
        siblings = asyncio.create_task(client.answers(make_prompt(40), STREAMED, n=2, seed=1))
        await asyncio.gather(*(follower.reached(3) for follower in followers))
        before = [len(follower.output.token_ids) for follower in followers]
        assert (await pair.drain_node("decode-0")).returncode == 0
        outputs = [await follower.end() for follower in followers]
        answers = await siblings
        alone = await client.answers(make_prompt(40), STREAMED, n=2, seed=1)
        gauges = await pair.gauges("decode-1")
    for output, other, num_before in zip(outputs, expected, before, strict=True):
        assert num_before < len(other.token_ids), "it had ended before it could move"
        assert output.tokens == other.tokens
        assert output.logprobs == other.logprobs
    assert [a.token_ids for a in answers] == [a.token_ids for a in alone]
    num_there = sum(output.decode_node == "decode-0" for output in outputs)
    assert num_there > len(requests) // 5
    assert num_there <= gauges["room_wait_seconds_count"] <= num_there + 2, "with the siblings"
    assert gauges["prefix_tokens"] == 0, "nothing was fetched, to be computed upon"
