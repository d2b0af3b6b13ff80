"""Structured output is exact in every mode: disaggregated, co-located, preempted and resumed.

A decode node with room for two requests serves a coordinator of either mode. Nothing but tokens
tells a node where an answer stands in its grammar.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest_asyncio

from pdserve.settings.config import RoutingConfig
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Output
from tests.cluster.fleet import Fleet, SecondCoordinator, fleet_config, running

MAX_TOKENS = 160
# 141 to 150 characters of one byte each: long enough for requests to be in each other's way.
REGEX = "([a-m]{10}-){12}[0-9a-f]{9}(x|yz{0,8})"
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c"]}, "maxItems": 3},
    },
    "required": ["id", "tags"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Modes:
    """The same nodes, seen by two coordinators."""

    fleet: Fleet
    disaggregated: Client
    colocated: Client


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def modes(tiny_checkpoint: Path) -> AsyncIterator[Modes]:
    engine = {"token_budget": 37, "max_model_len": 384, "kv_memory": "2MiB"}
    async with AsyncExitStack() as stack:
        routing = RoutingConfig(router="least-loaded", admission=False)
        second = SecondCoordinator(tiny_checkpoint, mode="colocated", routing=routing)
        stack.callback(second.release_ports)
        await stack.enter_async_context(second)
        little = [
            "--kv-memory=96KiB",
            "--set=policy.kv_headroom=greedy",
            "--set=policy.watermark=0",
        ]
        flags = {"decode-0": [*little, f"--coordinators={second.grpc_address}"]}
        fleet = Fleet(fleet_config(tiny_checkpoint, engine=engine), flags)
        await stack.enter_async_context(running(fleet))
        await second.wait_ready(["decode-0"])
        yield Modes(
            fleet,
            await stack.enter_async_context(Client(fleet.url)),
            await stack.enter_async_context(Client(second.url)),
        )


async def ask(client: Client, seed: int, **fields: Any) -> Output:
    sampling = {"temperature": 1.0, "seed": seed, "ignore_eos": False}
    return await client.complete(make_prompt(20, seed), MAX_TOKENS, **(sampling | fields))


async def test_answers_are_the_same_in_every_mode(modes: Modes) -> None:
    before = (await modes.fleet.gauges("decode-0"))["preemptions"]
    seeds = range(16)  # many, so that some meet however fast a step is
    together = await asyncio.gather(
        *(ask(modes.disaggregated, seed, guided_regex=REGEX) for seed in seeds)
    )
    after = (await modes.fleet.gauges("decode-0"))["preemptions"]
    assert after > before, "nothing was preempted"
    for output in together:
        assert re.fullmatch(REGEX, output.text), output.text
        assert output.finish_reason == "stop"
    for seed, output in list(zip(seeds, together, strict=True))[:3]:
        here = await ask(modes.disaggregated, seed, guided_regex=REGEX, cache_salt="here")
        there = await ask(modes.colocated, seed, guided_regex=REGEX, cache_salt="there")
        assert (here.prefill_node, there.prefill_node) == ("prefill-0", None)
        assert output.tokens == here.tokens == there.tokens
    assert (await modes.fleet.gauges("decode-0"))["preemptions"] == after


async def test_answers_conform_beside_others_that_need_not(modes: Modes) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    bound, free = await asyncio.gather(
        asyncio.gather(
            *(ask(modes.disaggregated, seed, response_format=wanted) for seed in range(4))
        ),
        asyncio.gather(*(ask(modes.disaggregated, seed) for seed in range(2))),
    )
    for output in bound:
        assert output.finish_reason == "stop"
        answer = json.loads(output.text)
        assert list(answer) == ["id", "tags"]
        assert 0 <= answer["id"] <= 999
        assert set(answer["tags"]) <= {"a", "b", "c"}
    for seed, output in enumerate(free):
        alone = await ask(modes.disaggregated, seed, cache_salt="alone")
        assert output.tokens == alone.tokens


async def test_what_is_cut_off_says_so(modes: Modes) -> None:
    output = await modes.disaggregated.complete(
        make_prompt(20), 7, guided_regex="[a-z]{20}", ignore_eos=False
    )
    assert output.finish_reason == "length"
    assert re.fullmatch("[a-z]{7}", output.text)
