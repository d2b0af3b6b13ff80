"""KV that is pulled layer by layer, while its prompt is still computed, gives the same tokens.

Every chunk is announced as soon as a layer of it is there, whatever its size.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.settings.config import HandoffConfig, PolicyConfig
from tests.checkpoints import make_checkpoint
from tests.cluster.checkpoints import MAX_MODEL_LEN, VOCAB_SIZE, Reference, make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.matrix import matrix

NUM_LAYERS = 6
LENGTHS = [1, 7, 8, 16, 24, 25, 100, 336, 700]
NUM_OUTPUT = 10
MAX_TRIES = 50

# Blocks of 24 tokens become blocks of 16 and of 7.
BLOCKS = {
    "prefill-0": ["--set=engine.block_size=24"],
    "decode-0": ["--set=engine.block_size=16", "--transports=shm"],
    "decode-1": ["--set=engine.block_size=7", "--transports=tcp"],
}


@dataclass(frozen=True)
class Served:
    """A fleet, and what it must say."""

    fleet: Fleet
    reference: Reference
    is_chunked: bool


@pytest_asyncio.fixture(
    scope="module", loop_scope="session", params=matrix([37, 4096], 1), ids=["chunks", "one chunk"]
)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    path: Path = make_checkpoint(
        tmp_path_factory.mktemp("layers"),
        "llama",
        num_hidden_layers=NUM_LAYERS,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    config = fleet_config(
        path,
        decode=2,
        engine={"token_budget": request.param},
        policy=PolicyConfig(prefill_chunk=request.param),  # whatever the profile recommends
        handoff=HandoffConfig(announce_bytes=1),
        checksums=True,
    )
    async with running(Fleet(config, BLOCKS)) as fleet:
        yield Served(fleet, Reference(path), request.param == 37)


@pytest.mark.parametrize("lengths", matrix([[1, 24, 25, 336], LENGTHS], 1), ids=["few", "all"])
async def test_tokens_are_exact(served: Served, lengths: list[int]) -> None:
    async with Client(served.fleet.url) as client:
        for length in lengths:
            outputs = await asyncio.gather(
                *(client.complete(make_prompt(length), NUM_OUTPUT, cache_salt=s) for s in "abcd")
            )
            expected = served.reference.greedy(make_prompt(length), NUM_OUTPUT)
            for output in outputs:
                assert output.tokens == expected, f"{length} tokens on {output.decode_node}"


async def test_a_prompt_is_announced_in_as_many_parts_as_it_has_layers(served: Served) -> None:
    num_chunks = 2 if served.is_chunked else 1  # 37 tokens fill a block of 24, and 72 fill three
    issued = []
    async with Client(served.fleet.url) as client:
        while not issued or issued[-1] != num_chunks * NUM_LAYERS:
            prompt = make_prompt(72, f"parts {len(issued)}")
            before = await served.fleet.gauges("prefill-0")
            output = await client.complete(prompt, NUM_OUTPUT)
            after = await served.fleet.gauges("prefill-0")
            assert output.tokens == served.reference.greedy(prompt, NUM_OUTPUT)
            issued.append(after["tickets_issued"] - before["tickets_issued"])
            # Who subscribes when layers are there already is told of all of them at once.
            assert 0 < issued[-1] <= num_chunks * NUM_LAYERS
            assert len(issued) < MAX_TRIES, f"tickets of each prompt: {issued}"


async def test_a_cached_prefix_is_announced_before_the_rest_is_computed(served: Served) -> None:
    prompt = make_prompt(300, "prefix")
    async with Client(served.fleet.url) as client:
        for tail in (0, 30):
            longer = prompt + make_prompt(tail, "tail")
            output = await client.complete(longer, NUM_OUTPUT)
            assert output.tokens == served.reference.greedy(longer, NUM_OUTPUT)
        assert output.num_cached_tokens == 288


async def test_clients_that_leave_while_layers_are_on_their_way(served: Served) -> None:
    """Whatever part of the prompt has been pulled by then: all blocks are free in the end."""
    async with Client(served.fleet.url) as client:
        for delay_s in (0.0, 0.005, 0.01, 0.02, 0.04):
            salt = str(delay_s)
            leaving = [
                asyncio.create_task(client.complete(make_prompt(700, i), 50, cache_salt=salt))
                for i in range(4)
            ]
            await asyncio.sleep(delay_s)
            for task in leaving:
                task.cancel()
            await asyncio.gather(*leaving, return_exceptions=True)
        await served.fleet.assert_baseline()
        expected = served.reference.greedy(make_prompt(700, 0), NUM_OUTPUT)
        assert (await client.complete(make_prompt(700, 0), NUM_OUTPUT)).tokens == expected
