"""Nodes that lay out their KV differently, or have another way to move it, give the same tokens."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.cluster.checkpoints import Reference, make_family, make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.matrix import matrix

LENGTHS = (1, 7, 8, 9, 16, 23, 24, 25, 37, 100, 336, 700)
NUM_OUTPUT = 10


FAMILIES = [
    "mistral, GQA, head_dim 64, sharded",
    "gemma3, qk-norm, windows, two ropes",
    "deepseek_v3, latent KV, groups of experts",
]


@pytest_asyncio.fixture(scope="module", loop_scope="session", params=matrix(FAMILIES, 1))
async def odd_fleet(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Fleet, Path]]:
    """Two KV heads, blocks of 24 -> 16 over shared memory and 24 -> 7 over TCP."""
    path = make_family(tmp_path_factory.mktemp("odd"), request.param)
    flags = {
        "prefill-0": ["--set=engine.block_size=24"],
        "decode-0": ["--set=engine.block_size=16", "--transports=shm"],
        "decode-1": ["--set=engine.block_size=7", "--transports=tcp"],
    }
    async with running(
        Fleet(fleet_config(path, decode=2, engine={"token_budget": 37}), flags)
    ) as fleet:
        yield fleet, path


async def assert_exact_on_both(client: Client, reference: Reference) -> None:
    """Every prompt several times at once, each time as if it were new."""
    requests = [(length, salt) for length in LENGTHS for salt in "abcd"]
    outputs = await asyncio.gather(
        *(
            client.complete(make_prompt(length), NUM_OUTPUT, cache_salt=salt)
            for length, salt in requests
        )
    )
    expected = {length: reference.greedy(make_prompt(length), NUM_OUTPUT) for length in LENGTHS}
    served: dict[str | None, set[int]] = defaultdict(set)  # decode node |-> lengths
    for (length, _), output in zip(requests, outputs, strict=True):
        assert output.tokens == expected[length], f"{length} tokens on {output.decode_node}"
        served[output.decode_node].add(length)
    assert min(len(served[node]) for node in ("decode-0", "decode-1")) > len(LENGTHS) // 2, served


@pytest.mark.long  # blocks of 24 go by default
async def test_blocks_of_16_to_blocks_of_16_by_shm_and_of_8_by_tcp(
    fleet: Fleet, client: Client, tiny_checkpoint: Path
) -> None:
    before = (await fleet.gauges("prefill-0"))["exported_bytes"]
    await assert_exact_on_both(client, Reference(tiny_checkpoint))
    await fleet.wait_for("prefill-0", lambda gauges: gauges["exported_bytes"] > before)  # over TCP


@pytest.mark.long  # test_layer_by_layer.py has them by default
async def test_blocks_of_24_to_blocks_of_16_by_shm_and_of_7_by_tcp(
    odd_fleet: tuple[Fleet, Path],
) -> None:
    fleet, path = odd_fleet
    async with Client(fleet.url) as client:
        await assert_exact_on_both(client, Reference(path))
    by_shm, by_tcp = [await fleet.gauges(f"decode-{i}") for i in (0, 1)]
    assert by_shm["pulled_bytes"] > 0 < by_tcp["pulled_bytes"]
    # TCP carried what one of them pulled, some of it coded if the machine was busy, and nothing
    # else. It is counted once it has left.
    raw = by_tcp["pulled_bytes"] - by_tcp["pulled_coded_bytes"]
    carried = raw + by_tcp["pulled_sent_bytes"]
    await fleet.wait_for("prefill-0", lambda gauges: gauges["exported_bytes"] >= carried)
    assert (await fleet.gauges("prefill-0"))["exported_bytes"] == carried


@pytest.mark.long  # test_exactness.py has it by default
async def test_the_seed_decides_whatever_the_way(client: Client) -> None:
    for length in (5, 50, 500):
        prompt = make_prompt(length, "seeded")
        outputs = await asyncio.gather(
            *(client.complete(prompt, 20, temperature=1.0, seed=11) for _ in range(6))
        )
        assert {output.decode_node for output in outputs} == {"decode-0", "decode-1"}
        assert len({tuple(output.tokens) for output in outputs}) == 1
