"""Nodes whose ranks have KV of their own, as on GPUs, here by gloo: the tokens of one rank."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.settings.config import NodeConfig, PrefixConfig, RoutingConfig
from tests.cluster.checkpoints import Reference, make_family, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import HEARD_S, Fleet, fleet_config, poll, running
from tests.cluster.forked import ForkedChild
from tests.cluster.test_ranks import children, gone

LENGTHS = (1, 17, 100, 336)
NUM_OUTPUT = 10
NUM_STREAMED = 120  # of the streams that move


def as_on_gpus() -> None:
    """Models are planned as for GPUs, and ranks are forked: starting Python takes seconds.

    Those of decode-0 are started as ever.
    """
    from pdserve.node import runtime
    from pdserve.node.device_ranks import start
    from pdserve.node.start.model import NodeModel, plan_model
    from tests.unit.node.device_ranked import ForkedRank

    python = start._python

    def planned(config: NodeConfig) -> NodeModel:
        if config.node_id != "decode-0":
            start._python = ForkedRank
        return replace(plan_model(config), kernels=None)

    assert python is start._python
    runtime.plan_model = planned


class GpuChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None]:
        return as_on_gpus


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """2 ranks and 4 -> 2 ranks by shared memory, and -> 1 by TCP."""
    family = "llama, GQA, head_dim 64, llama3 rope"  # 2 KV heads
    flags = {
        "prefill-0": ["--tensor-parallel=2"],
        "prefill-1": ["--tensor-parallel=4"],
        "decode-0": ["--tensor-parallel=2"],
        "decode-1": ["--transports=tcp"],
    }
    config = fleet_config(
        make_family(tmp_path_factory.mktemp("ranked"), family),
        prefill=2,
        decode=2,
        engine={"token_budget": 64},
        prefix=PrefixConfig(prefix_pull="always"),
        routing=RoutingConfig(router="random", admission=False),  # every pair has its turn
    )
    async with running(Fleet(config, flags, GpuChild)) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reference(ranked: Fleet) -> Reference:
    return Reference(Path(ranked.config.checkpoint.model))


async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    requests = [(length, salt) for length in LENGTHS for salt in "abcdef"]
    async with Client(ranked.url) as client:
        outputs = await asyncio.gather(
            *(
                client.complete(make_prompt(length), NUM_OUTPUT, cache_salt=salt)
                for length, salt in requests
            )
        )
    expected = {length: reference.greedy(make_prompt(length), NUM_OUTPUT) for length in LENGTHS}
    pairs: Counter[tuple[str | None, str | None]] = Counter()
    for (length, _), output in zip(requests, outputs, strict=True):
        pair = output.prefill_node, output.decode_node
        assert output.tokens == expected[length], f"{length} tokens from {pair}"
        pairs[pair] += 1
    assert len(pairs) == 4, pairs


async def test_a_prefix_is_pulled_by_a_node_of_other_ranks(
    ranked: Fleet, reference: Reference
) -> None:
    prompt = make_prompt(700, "shared")
    expected = reference.greedy(prompt, NUM_OUTPUT)
    async with Client(ranked.url) as client:
        first = await client.complete(prompt, 1)
        assert first.num_cached_tokens == 0
        outputs = await asyncio.gather(*(client.complete(prompt, NUM_OUTPUT) for _ in range(6)))
    assert {output.prefill_node for output in outputs} == {"prefill-0", "prefill-1"}
    for output in outputs:
        assert output.tokens == expected, output
        assert output.num_cached_tokens >= 600, "it was pulled, not computed again"


async def test_streams_move_from_a_node_that_drains(ranked: Fleet) -> None:
    """With their KV, from one rank to two."""
    async with Client(ranked.url) as client:
        prompts = [make_prompt(30, f"drain {seed}") for seed in range(4)]
        expected = await asyncio.gather(
            *(client.complete(prompt, NUM_STREAMED) for prompt in prompts)
        )
        followers = [Follower(client, prompt, NUM_STREAMED) for prompt in prompts]
        for follower in followers:
            await follower.reached(5)
        node = ranked.pid("decode-1")
        os.kill(node, signal.SIGTERM)
        outputs = [await follower.end() for follower in followers]
        await poll(lambda: gone([node]), HEARD_S, lambda: f"{node} is there")
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    await ranked.restore()
    await ranked.wait_back()


async def test_a_killed_rank_ends_its_node_and_its_streams_go_on(ranked: Fleet) -> None:
    node = ranked.pid("decode-0")
    ranks = children(node)
    assert len(ranks) == 1
    async with Client(ranked.url) as client:
        prompts = [make_prompt(30, seed) for seed in range(4)]
        expected = await asyncio.gather(
            *(client.complete(prompt, NUM_STREAMED) for prompt in prompts)
        )
        followers = [Follower(client, prompt, NUM_STREAMED) for prompt in prompts]
        for follower in followers:
            await follower.reached(5)
        os.kill(ranks[0], signal.SIGKILL)
        await poll(lambda: gone([node, *ranks]), HEARD_S, lambda: f"{node} {ranks} are there")
        outputs = [await follower.end() for follower in followers]
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    await ranked.wait_gone("decode-0")


async def test_ranks_end_with_their_node(ranked: Fleet) -> None:
    node = ranked.pid("prefill-0")
    ranks = children(node)
    assert len(ranks) == 1
    os.kill(node, signal.SIGKILL)
    await poll(lambda: gone(ranks), HEARD_S, lambda: f"{ranks} are there")
    await ranked.wait_gone("prefill-0")
