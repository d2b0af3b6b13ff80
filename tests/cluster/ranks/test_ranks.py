"""Nodes of several ranks, stages and hosts: the tokens of one, whoever has whose KV, however."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.adapters import make_adapter, merged
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.cluster.forked import ForkedChild
from tests.cluster.ranks.ranked_nodes import (
    COMPARED,
    NUM_OUTPUT,
    RankHost,
    check_every_pair,
    check_host_waits,
    check_killed_rank,
    check_lost_host,
    check_prefix_is_pulled,
    check_ranks_end,
    config_of_pairs,
)
from tests.forked_rank import fork_ranks

LENGTHS = (1, 17, 100, 336)
NUM_STREAMED = 400  # tokens of the streams that go on elsewhere


class RanksForked(ForkedChild):
    """A process that forks its ranks, too. One starts Python anew for them."""

    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        return None if "--node-id=prefill-1" in words else fork_ranks


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hosts(checkpoint: Path) -> AsyncIterator[list[RankHost]]:
    """The second hosts of prefill-1 and decode-1."""
    hosts = [RankHost(checkpoint), RankHost(checkpoint, RanksForked)]
    yield hosts
    for host in hosts:
        await host.end()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(checkpoint: Path, hosts: list[RankHost]) -> AsyncIterator[Fleet]:
    """2 ranks and 2 hosts -> 2 x 2 ranks by shared memory, and -> 2 hosts by TCP."""
    flags = {
        "prefill-0": ["--tensor-parallel=2"],
        "prefill-1": [f"--rank-hosts={hosts[0].address}"],
        "decode-0": ["--tensor-parallel=2", "--set=engine.pipeline_parallel=2"],
        "decode-1": ["--transports=tcp", f"--rank-hosts={hosts[1].address}"],
    }
    config = config_of_pairs(checkpoint)
    async with running(Fleet(config, flags, RanksForked)) as fleet:
        yield fleet


async def test_ranks_of_one_host_and_of_two_give_the_tokens_of_transformers(
    checkpoint: Path, reference: Reference
) -> None:
    """2 ranks -> 2 hosts by TCP. Then the ranks end with their node."""
    host = RankHost(checkpoint, RanksForked)
    flags = {
        "prefill-0": ["--tensor-parallel=2"],
        "decode-0": ["--transports=tcp", f"--rank-hosts={host.address}"],
    }
    config = fleet_config(checkpoint, engine={"token_budget": 64})
    async with running(Fleet(config, flags, RanksForked)) as fleet:
        async with Client(fleet.url) as client:
            for length in LENGTHS:
                output = await client.complete(make_prompt(length), NUM_OUTPUT)
                assert output.tokens == reference.greedy(make_prompt(length), NUM_OUTPUT), length
        await check_ranks_end(fleet, "prefill-0")
    await host.end()


@pytest.mark.long
async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    await check_every_pair(ranked, reference, LENGTHS, COMPARED)


@pytest.mark.long
async def test_a_prefix_is_pulled_by_a_node_of_other_ranks(
    ranked: Fleet, reference: Reference
) -> None:
    await check_prefix_is_pulled(ranked, reference)


@pytest.mark.long  # in one process they do by default
async def test_ranks_of_one_host_and_of_several_serve_adapters(
    ranked: Fleet, checkpoint: Path, tmp_path: Path
) -> None:
    adapter = make_adapter(tmp_path / "adapter", checkpoint, rank=3, strength=2.0)
    model, prompt = merged(tmp_path / "merged", checkpoint, adapter), make_prompt(40)
    expected = Reference(model).greedy(prompt, 12)
    url = f"{ranked.url}/v1"
    async with (
        openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk,
        Client(ranked.url) as client,
    ):
        body = {"lora_name": "a", "lora_path": str(adapter)}
        await sdk.post("/load_lora_adapter", cast_to=str, body=body)
        (state,) = (await ranked.status()).coordinator.adapters
        assert sorted(state.nodes) == ["decode-0", "decode-1", "prefill-0", "prefill-1"]
        outputs = await asyncio.gather(
            *(client.complete(prompt, 12, model="a", cache_salt=salt) for salt in COMPARED)
        )
        assert [output.tokens for output in outputs] == [expected] * len(COMPARED)
        assert len({(one.prefill_node, one.decode_node) for one in outputs}) == 4
        await sdk.post("/unload_lora_adapter", cast_to=str, body={"lora_name": "a"})


@pytest.mark.long  # in one process it ends the steps by default
async def test_a_killed_rank_ends_its_node_and_its_streams_go_on(ranked: Fleet) -> None:
    await check_killed_rank(ranked, "decode-0", 3, NUM_STREAMED)


@pytest.mark.long  # in one process it ends the node by default
async def test_a_lost_host_ends_its_node_and_its_streams_go_on(
    ranked: Fleet, hosts: list[RankHost]
) -> None:
    await check_lost_host(ranked, "decode-1", hosts[1], 1, NUM_STREAMED)


@pytest.mark.long  # in one process a host outlives its node by default
async def test_a_host_waits_for_its_node_to_come_back(
    ranked: Fleet, hosts: list[RankHost], reference: Reference
) -> None:
    await check_host_waits(ranked, "prefill-1", hosts[0], reference)


@pytest.mark.long
async def test_ranks_end_with_their_node(ranked: Fleet) -> None:
    await check_ranks_end(ranked, "prefill-0")
