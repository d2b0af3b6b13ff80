"""KV in codes of 8 bits, or rounded to them: any way a request takes gives the same tokens.

With pulls, chunks, prefixes, the host tier, takeovers, resumes and ranks, in all modes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from pdserve import _native
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.engine.kv.cache import KvCache
from pdserve.engine.model_runner import ModelRunner
from pdserve.engine.models.config import load_model_config
from pdserve.engine.plan.forms import FLOAT32, ActivationDtype
from pdserve.engine.plan.model import ModelPlan
from pdserve.engine.weights.load import load_decoder
from pdserve.kv import KvDtype
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.settings.prefixes import PrefixConfig
from tests.cluster.checkpoints import make_family, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import START_S, Fleet, fleet_config, poll, running
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_model.harness import Node

WINDOWED = "gemma3, qk-norm, windows, two ropes"
LENGTHS = (1, 16, 37, 100, 336)
NUM_OUTPUT = 12
STREAMED = 600
FORMATS = [
    {name: codes} for codes in (KvDtype.INT8, KvDtype.FP8) for name in ("kv_dtype", "wire_dtype")
]
MODES: tuple[dict[str, Any], ...] = (
    {"mode": "disaggregated", "decode": 2},
    {"mode": "adaptive", "decode": 2},
    {"mode": "flowing", "prefill": 2, "decode": 2},
    {"mode": "colocated", "decode": 2},
)
ALONE = {"mode": "multiplexed"}  # one node, of one rank
RANKS: tuple[dict[str, int], ...] = ({}, {"tensor_parallel": 2}, {"pipeline_parallel": 2})


def tokens_alone(
    path: Path, kv: dict[str, KvDtype], prompts: Sequence[list[int]]
) -> list[list[int]]:
    """What one process makes of each, in one step a prompt."""
    checkpoint, cpu = resolve_checkpoint(str(path)), torch.device("cpu")
    config = load_model_config(checkpoint)
    plan = ModelPlan.of(config, form=FLOAT32)
    model = load_decoder(checkpoint, plan, ActivationDtype.FLOAT32, cpu)
    layout = config.kv_layout(16, kv.get("kv_dtype", KvDtype.FLOAT32), kv.get("wire_dtype"))
    kv_cache = KvCache(layout, 64, cpu)
    node = Node(model, kv_cache, ModelRunner(model, kv_cache), list(range(64)))
    found = []
    for prompt in prompts:
        request = make_request(prompt)
        node.generate([request], NUM_OUTPUT)
        found.append(request.output_token_ids)
    return found


async def tokens_colocated(config: ClusterConfig, prompts: Sequence[list[int]]) -> list[list[int]]:
    """What one node of the same ranks makes of each: they add up in another order than one."""
    alone = replace(config, mode="colocated", prefill=None, decode=1)
    async with running(Fleet(alone)) as fleet, Client(fleet.url) as client:
        return [(await client.complete(prompt, NUM_OUTPUT)).tokens for prompt in prompts]


# Every pair of a mode, a format and ranks. What tells most is first: unequal blocks by both
# transports.
CASES = [
    *(
        (fields, kv, RANKS[(mode + form) % len(RANKS)])
        for mode, fields in enumerate(MODES)
        for form, kv in enumerate(FORMATS)
    ),
    *((ALONE, kv, {"threads": 2}) for kv in FORMATS),
]


@pytest.mark.parametrize(("fields", "kv", "ranks"), matrix(CASES, 1))
async def test_tokens_are_those_of_one_node_alone(
    fields: dict[str, Any], kv: dict[str, KvDtype], ranks: dict[str, int], tmp_path: Path
) -> None:
    """Each prompt twice, the second time perhaps as a prefix; blocks of 24, 16 and 7."""
    path = make_family(tmp_path / "model", WINDOWED)
    prompts = [make_prompt(length) for length in LENGTHS]
    flags = {
        "decode-0": ["--set=engine.block_size=16", "--transports=shm"],
        "decode-1": ["--set=engine.block_size=7", "--transports=tcp"],
    }
    engine: dict[str, Any] = {"token_budget": 37, "block_size": 24, **kv, **ranks}
    # The build that is alone, too: norms of heads are another last bit with narrower vectors.
    engine["kernels"] = _native.kernel_variants()[0]
    config = fleet_config(path, engine=engine, checksums=True, **fields)
    expected = await asyncio.to_thread(tokens_alone, path, kv, prompts)
    if "tensor_parallel" in ranks:
        expected = await tokens_colocated(config, prompts)
    async with running(Fleet(config, flags)) as fleet, Client(fleet.url) as client:
        for salts in (["a", "b"], ["a", "b"]):
            outputs = await asyncio.gather(
                *(
                    client.complete(prompt, NUM_OUTPUT, cache_salt=salt)
                    for salt in salts
                    for prompt in prompts
                )
            )
            assert [output.tokens for output in outputs] == expected * len(salts)


@pytest.mark.long  # tokens of one pair are compared by default
@pytest.mark.parametrize("kv", matrix(reversed(FORMATS), 1))
async def test_streams_that_move_resume_and_come_from_the_tier(
    kv: dict[str, KvDtype], tiny_checkpoint: Path
) -> None:
    """Two nodes of few blocks: one is drained, comes back, and then the other is killed."""
    engine: dict[str, Any] = {"kv_memory": "1MiB", "max_model_len": 1100, **kv}
    config = fleet_config(
        tiny_checkpoint,
        mode="colocated",
        decode=2,
        engine=engine,
        prefix=PrefixConfig(tier_memory="4MiB", prefix_pull="always"),
    )
    prompts = [make_prompt(length) for length in (3, 16, 100, 333)]
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        expected = [(await client.complete(prompt, STREAMED)).tokens for prompt in prompts]
        for stop in (fleet.drain_node, fleet.kill_node):
            followers = [Follower(client, prompt, STREAMED) for prompt in prompts]
            await asyncio.gather(*(follower.reached(3) for follower in followers))
            await stop("decode-0")
            assert [(await follower.end()).tokens for follower in followers] == expected
            await fleet.start_node("decode-0")
            await fleet.wait_back()
        gauges = await fleet.gauges("decode-1")
        assert gauges["tier_held_blocks"] > 0


async def test_pools_of_other_formats_do_not_serve_together(tiny_checkpoint: Path) -> None:
    fleet = Fleet(fleet_config(tiny_checkpoint), {"decode-0": ["--kv-dtype=int8"]})

    async def is_refused() -> bool:
        return any("KV is " in line and "same --kv-dtype" in line for _, line in fleet.lines)

    try:
        await fleet.spawn()
        await poll(is_refused, START_S, lambda: "nobody was refused")
        assert not (await fleet.status()).ready
    finally:
        await fleet.kill()
