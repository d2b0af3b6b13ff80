"""Nodes of 1, 2 and 4 tensor-parallel ranks: the tokens of one, whoever has whose KV, however."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.settings.config import PrefixConfig, RoutingConfig
from tests.cluster.checkpoints import Reference, make_family, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import HEARD_S, Fleet, fleet_config, poll, running

LENGTHS = (1, 16, 17, 100, 336)
NUM_OUTPUT = 10


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """2 and 1 -> 4 by shared memory, 2 and 1 -> 1 by TCP; two KV heads are split and replicated."""
    path = make_family(tmp_path_factory.mktemp("ranked"), "llama, GQA, head_dim 64, llama3 rope")
    flags = {
        "prefill-0": ["--tensor-parallel=2"],
        "decode-0": ["--tensor-parallel=4"],
        "decode-1": ["--transports=tcp"],
    }
    config = fleet_config(
        path,
        prefill=2,
        decode=2,
        engine={"token_budget": 64},
        prefix=PrefixConfig(prefix_pull="always"),
        routing=RoutingConfig(router="random", admission=False),  # every pair has its turn
    )
    async with running(Fleet(config, flags)) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reference(ranked: Fleet) -> Reference:
    return Reference(Path(ranked.config.checkpoint.model))


async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    requests = [(length, salt) for length in LENGTHS for salt in "abcdefgh"]
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


async def test_a_killed_rank_ends_its_node_and_its_streams_go_on(ranked: Fleet) -> None:
    node = ranked.pid("decode-0")
    ranks = children(node)
    assert len(ranks) == 3
    async with Client(ranked.url) as client:
        prompts = [make_prompt(30, seed) for seed in range(4)]
        expected = await asyncio.gather(*(client.complete(prompt, 400) for prompt in prompts))
        followers = [Follower(client, prompt, 400) for prompt in prompts]
        for follower in followers:
            await follower.reached(5)
        os.kill(ranks[1], signal.SIGKILL)
        await poll(lambda: gone([node, *ranks]), HEARD_S, lambda: f"{node} {ranks} are there")
        outputs = [await follower.end() for follower in followers]
    assert [o.tokens for o in outputs] == [o.tokens for o in expected]
    assert {o.decode_node for o in outputs} >= {"decode-1"}


async def test_ranks_end_with_their_node(ranked: Fleet) -> None:
    node = ranked.pid("prefill-0")
    ranks = children(node)
    assert len(ranks) == 1
    os.kill(node, signal.SIGKILL)
    await poll(lambda: gone(ranks), HEARD_S, lambda: f"{ranks} are there")


def children(pid: int) -> list[int]:
    """Processes that this one has started and that are running."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


async def gone(pids: list[int]) -> bool:
    """Whether all of them have ended; one whose end nobody has asked for yet has, too."""
    return all(state(pid) in "ZX" for pid in pids)


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"
