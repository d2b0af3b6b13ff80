"""Disaggregated = co-located = transformers, token by token, in float32, for every family.

The two modes share the decode node: it is a member of two coordinators, one of which knows of no
prefill node. A token budget of 37 lets no chunk end where a block of 16 ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.cluster.checkpoints import FAMILIES, Reference, make_family, make_prompt
from tests.cluster.client import Client, Output
from tests.cluster.fleet import Fleet, SecondCoordinator, fleet_config, running
from tests.matrix import matrix

BUDGET = 37
BLOCK = 16
# One token; around a block, a chunk, two chunks; both borders at once (592); several thousand.
LENGTHS = [1, 16, 37, 75, 592], [2, 15, 17, 38, 48, 74, 333, 593, 3500]
NUM_OUTPUT = 12

SAMPLED: list[dict[str, Any]] = [
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.7, "seed": 2, "top_k": 20},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8},
    {"temperature": 1.0, "seed": 4, "min_p": 0.05, "presence_penalty": 0.5},
    {"temperature": 0.9, "seed": 5, "frequency_penalty": 0.7, "logit_bias": {"65": 3.0}},
    {"temperature": 0.8, "seed": 2**62 + 6, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.2},
    {"temperature": 0.0},
]


@dataclass(frozen=True)
class Served:
    """One checkpoint, served both ways."""

    fleet: Fleet
    disaggregated: Client
    colocated: Client
    reference: Reference


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=matrix(FAMILIES, {"gemma3, qk-norm, windows, two ropes"}),
)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    path = make_family(tmp_path_factory.mktemp("family"), request.param)
    engine = {"token_budget": BUDGET, "block_size": BLOCK, "kv_memory": "128MiB"}
    async with AsyncExitStack() as stack:
        second = SecondCoordinator(path, mode="colocated")
        stack.callback(second.release_ports)
        await stack.enter_async_context(second)
        both = {"decode-0": [f"--coordinators={second.grpc_address}"]}
        fleet = Fleet(fleet_config(path, engine=engine), both)
        await stack.enter_async_context(running(fleet))
        reference = Reference(path)
        await second.wait_ready(["decode-0"])
        yield Served(
            fleet,
            await stack.enter_async_context(Client(fleet.url)),
            await stack.enter_async_context(Client(second.url)),
            reference,
        )


@pytest.mark.parametrize("lengths", matrix(LENGTHS, 1), ids=["some", "others"])
async def test_greedy_tokens_are_those_of_transformers(served: Served, lengths: list[int]) -> None:
    for length in lengths:
        prompt = make_prompt(length)
        expected, here, there = await asyncio.gather(
            asyncio.to_thread(served.reference.greedy, prompt, NUM_OUTPUT),
            # Its own cache salt, so that neither mode lives on what the other has computed.
            served.disaggregated.complete(prompt, NUM_OUTPUT, cache_salt="here"),
            served.colocated.complete(prompt, NUM_OUTPUT, cache_salt="there"),
        )
        assert here.tokens == expected, f"disaggregated, {length} tokens"
        assert there.tokens == expected, f"co-located, {length} tokens"
        assert (here.prefill_node, here.decode_node) == ("prefill-0", "decode-0")
        assert (there.prefill_node, there.decode_node) == (None, "decode-0")


async def test_a_cached_prefix_changes_nothing(served: Served) -> None:
    prompt = make_prompt(300, "prefix")
    for tail in (0, 1, 20):
        longer = prompt + make_prompt(tail, "tail")
        expected = served.reference.greedy(longer, NUM_OUTPUT)
        for client in (served.disaggregated, served.colocated):
            first = await client.complete(longer, NUM_OUTPUT)
            again = await client.complete(longer, NUM_OUTPUT)
            assert first.tokens == again.tokens == expected
            assert again.num_cached_tokens == (len(longer) - 1) // BLOCK * BLOCK


async def test_32_at_a_time_joining_and_leaving_get_what_they_get_alone(served: Served) -> None:
    """Greedy and seeded, of all lengths, so that each is batched with ever other ones."""

    def request(index: int) -> dict[str, Any]:
        prompt = make_prompt(1 + index * 7 % 150, index)
        num_output = 1 + index * 5 % 23
        fields = {"prompt": prompt, "max_tokens": num_output}
        return fields | SAMPLED[index % len(SAMPLED)]

    async def run_when_free(index: int, free: asyncio.Semaphore) -> Output:
        async with free:
            return await served.disaggregated.stream_all(**request(index), cache_salt="crowd")

    num_requests = 48
    free = asyncio.Semaphore(32)
    crowd = await asyncio.gather(*(run_when_free(i, free) for i in range(num_requests)))
    for index, output in enumerate(crowd):
        alone = await served.colocated.complete(**request(index), cache_salt="alone")
        assert output.tokens == alone.tokens, f"request {index}: {SAMPLED[index % len(SAMPLED)]}"
        assert output.text == alone.text
        assert len(output.tokens) == 1 + index * 5 % 23
    assert len({tuple(output.tokens) for output in crowd}) > num_requests // 2


async def test_logprobs_are_the_same_both_ways(served: Served) -> None:
    prompt = make_prompt(100, "logprobs")
    here = await served.disaggregated.complete(prompt, 10, logprobs=0)
    there = await served.colocated.complete(prompt, 10, logprobs=0)
    assert here.tokens == there.tokens
    assert here.logprobs == pytest.approx(there.logprobs, abs=1e-4)
    assert len(here.logprobs) == 10
