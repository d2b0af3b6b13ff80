"""Families and modes, through all that may happen to a family's KV: the tokens of transformers.

Each kind of KV is there in every mode, and further families of those kinds take the modes in turn;
test_exactness.py has all of them, undisturbed. Each cluster has nodes of other block sizes and
other ranks, pools that hold few prompts, and a host tier behind them. Prompts are computed, shared
and evicted; streams lose their node, and are moved.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.engine.models.config import load_model_config
from pdserve.kv.layout import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.settings.config import Mode
from pdserve.settings.prefixes import PrefixConfig
from pdserve.settings.values import format_cpus
from tests.cluster.checkpoints import FAMILIES, Reference, make_family, make_prompt
from tests.cluster.client import Client, Follower, Output
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.cluster.forked import ForkedChild
from tests.forked_rank import fork_ranks

POOLS: Final[dict[Mode, tuple[int, int]]] = {  # mode |-> prefill and decode nodes
    "disaggregated": (2, 2),
    "colocated": (0, 2),
    "flowing": (1, 2),
    "adaptive": (1, 2),
    "multiplexed": (0, 1),  # on two cores
}
EVERY_MODE: Final = (  # grouped heads; windows; latent rows; sinks
    "llama, GQA, head_dim 64, llama3 rope",
    "gemma3, qk-norm, windows, two ropes",
    "deepseek_v3, latent KV, groups of experts",
    "gpt-oss, sinks, experts, windows",
)
CASES: Final = [
    *product(EVERY_MODE, POOLS),
    *zip([family for family in FAMILIES if family not in EVERY_MODE], cycle(POOLS), strict=False),
]
LENGTHS: Final = (1, 16, 38, 333)
NUM_OUTPUT: Final = 8
POOL: Final = 1536  # tokens of a pool
NUM_PROMPTS, PROMPT = 12, 300  # more than the pools hold
NUM_STREAMS, STREAMED = 4, 700

CORES: Final = sorted(os.sched_getaffinity(0))[:2]

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(len(CORES) < 2, reason="one core cannot be split"),
]


class RanksForked(ForkedChild):
    """A process that forks its ranks, too."""

    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        return fork_ranks


@dataclass(frozen=True)
class Served:
    """One family in one mode."""

    fleet: Fleet
    client: Client
    reference: Reference


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="session",
    params=CASES,
    ids=lambda param: f"{param[0].partition(',')[0]}-{param[1]}",
)
async def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    family, mode = request.param
    path = make_family(tmp_path_factory.mktemp("family"), family)
    config = cluster_config(path, mode)
    fleet = Fleet(config, flags_of(mode), RanksForked)
    async with running(fleet), Client(fleet.url) as client:
        yield Served(fleet, client, Reference(path))


def cluster_config(path: Path, mode: Mode) -> ClusterConfig:
    layout = load_model_config(resolve_checkpoint(str(path))).kv_layout(1, KvDtype.FLOAT32)
    engine = {"token_budget": 37, "max_model_len": 1024}
    engine |= {"kv_memory": str(POOL * layout.token_bytes)}
    if mode == "multiplexed":
        engine |= {"threads": 0, "cpus": format_cpus(CORES)}
    prefix = PrefixConfig(tier_memory=str(4 * POOL * layout.token_bytes), prefix_pull="always")
    prefill, decode = POOLS[mode]
    return fleet_config(
        path, mode=mode, prefill=prefill, decode=decode, engine=engine, prefix=prefix
    )


def flags_of(mode: Mode) -> dict[str, list[str]]:
    """What its nodes differ in; who computes both phases at once has no other ranks."""
    flags = {
        "prefill-0": ["--set=engine.block_size=24"],
        "prefill-1": ["--set=engine.tensor_parallel=2"],
        "decode-1": ["--set=engine.block_size=7", "--transports=tcp"],
    }
    if mode != "multiplexed":
        flags["decode-0"] = ["--set=engine.pipeline_parallel=2"]
    return flags


async def check(served: Served, prompts: Sequence[list[int]], **fields: Any) -> list[Output]:
    """All of them at once give the tokens of transformers."""
    outputs = await asyncio.gather(
        *(served.client.complete(prompt, NUM_OUTPUT, **fields) for prompt in prompts)
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = served.reference.greedy(prompt, NUM_OUTPUT)
        assert output.tokens == expected, f"{len(prompt)} tokens on {output.decode_node}"
    return outputs


async def test_prompts_and_their_prefixes(served: Served) -> None:
    prompts = [make_prompt(length) for length in LENGTHS]
    for salt in "ab":
        await check(served, prompts, cache_salt=salt)
    begin = make_prompt(PROMPT, "shared")
    await check(served, [begin])
    shared = await check(served, [begin + make_prompt(tail, "tail") for tail in (1, 5, 40, 41)])
    assert sum(output.num_cached_tokens for output in shared) > PROMPT


async def test_prompts_that_were_evicted_come_back_from_the_host_tier(served: Served) -> None:
    prompts = [make_prompt(PROMPT, seed) for seed in range(NUM_PROMPTS)]
    loaded = 0.0
    for prompt in prompts * 2:
        await check(served, [prompt])
    for name in served.fleet.node_names:
        loaded += (await served.fleet.gauges(name))["tier_loaded"]
    assert loaded > 0


async def test_streams_outlive_their_node_and_move(served: Served) -> None:
    fleet = served.fleet
    prompts = [make_prompt(30, f"stream {number}") for number in range(NUM_STREAMS)]
    streams = [Follower(served.client, prompt, STREAMED) for prompt in prompts]
    await asyncio.gather(*(stream.reached(3) for stream in streams))
    killed = streams[0].output.decode_node or "decode-0"
    await fleet.kill_node(killed)
    await fleet.start_node(killed)
    await fleet.wait_back()
    await go_on(streams)
    if left := [name for name in fleet.node_names if name[0] == "d" and name != killed]:
        assert (await fleet.drain_node(left[0])).returncode == 0
        await go_on(streams)
    for prompt, stream in zip(prompts, streams, strict=True):
        output = await stream.end()
        assert served.reference.is_greedy(prompt, output.tokens)
        assert len(output.tokens) == STREAMED


async def go_on(streams: Sequence[Follower]) -> None:
    """Each gets further tokens, unless it has all."""
    at = [len(stream.output.token_ids) for stream in streams]
    await asyncio.gather(
        *(stream.reached(min(STREAMED, n + 10)) for stream, n in zip(streams, at, strict=True))
    )
