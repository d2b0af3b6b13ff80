"""Prefill nodes have other weights than decode nodes: tokens depend on the pair, and on no node.

With pulls, chunks, prefixes, the host tier, takeovers, resumes and preemptions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from pdserve import _native
from pdserve.commands.cluster.config import ClusterConfig
from pdserve.kv import KvDtype
from pdserve.settings.prefixes import PrefixConfig
from tests.cluster.checkpoints import make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.matrix import matrix
from tests.requests import make_request
from tests.unit.engine_model.harness import Node

PAIRS = [("int8", "int4"), ("none", "int4"), ("fp8", "int8"), ("none", "int8"), ("int4", "none")]
LENGTHS = (3, 333)
NUM_OUTPUT, MUCH = 400, 2000


def tokens_by_role(
    path: Path, pair: tuple[str, str], prompts: Sequence[list[int]]
) -> list[list[int]]:
    """What one process makes of each: prompt and token 1 by one model, the rest by another."""
    prefill, decode = (
        Node.load(path, dtype=KvDtype.BFLOAT16, quantization=quantization) for quantization in pair
    )
    found = []
    for prompt in prompts:
        request = make_request(prompt, max_tokens=NUM_OUTPUT)
        prefill.generate([request], 1)
        decode.kv_cache.pool.copy_(prefill.kv_cache.pool)
        decode.free = list(prefill.free)
        decode.generate([request], NUM_OUTPUT)
        found.append(request.output_token_ids)
    return found


def config_of(path: Path, pair: tuple[str, str], **fields: object) -> ClusterConfig:
    prefill, decode = pair
    engine = {
        "dtype": "bfloat16",
        "prefill_quantization": prefill,
        "quantization": decode,
        "token_budget": 37,
        "max_model_len": 2400,
        "kernels": _native.kernel_variants()[0],  # the build that computes here, too
    }
    return fleet_config(
        path, engine=engine | fields.pop("engine", {}), mode="disaggregated", **fields
    )


@pytest.mark.parametrize(("prefill", "decode"), matrix(PAIRS, 1))
async def test_tokens_depend_on_the_pair_alone(
    prefill: str, decode: str, tiny_checkpoint: Path
) -> None:
    """Nodes of few blocks: streams are preempted, taken over and resumed, prefixes come back."""
    pair, prompts = (prefill, decode), [make_prompt(length) for length in LENGTHS]
    expected = await asyncio.to_thread(tokens_by_role, tiny_checkpoint, pair, prompts)
    config = config_of(
        tiny_checkpoint,
        pair,
        decode=2,
        prefix=PrefixConfig(tier_memory="4MiB", prefix_pull="always"),
    )
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        for _ in range(2):
            outputs = await asyncio.gather(*(client.complete(p, NUM_OUTPUT) for p in prompts))
            assert [output.tokens for output in outputs] == expected
        for stop in (fleet.drain_node, fleet.kill_node):
            followers = [Follower(client, prompt, NUM_OUTPUT) for prompt in prompts]
            await asyncio.gather(*(follower.reached(3) for follower in followers))
            await stop("decode-0")
            assert [(await follower.end()).tokens for follower in followers] == expected
            await fleet.start_node("decode-0")
            await fleet.wait_back()
        # An answer is part of the next prompt, which a prefill node computes, all of it.
        longer = [p + tokens[:100] for p, tokens in zip(prompts, expected, strict=True)]
        ends = await asyncio.to_thread(tokens_by_role, tiny_checkpoint, pair, longer)
        outputs = await asyncio.gather(*(client.complete(p, NUM_OUTPUT) for p in longer))
        assert [output.tokens for output in outputs] == ends
        gauges = [await fleet.gauges(name) for name in ("decode-0", "decode-1")]
        assert [each["decode_precision_tokens"] for each in gauges] == [0, 0]
        # Without prefill nodes they go on all the same, and it is said.
        followers = [Follower(client, prompt, MUCH) for prompt in prompts]
        await asyncio.gather(*(follower.reached(3) for follower in followers))
        await fleet.kill_node("prefill-0")
        await fleet.kill_node("decode-0")
        ended = [await follower.end() for follower in followers]
        assert [len(output.tokens) for output in ended] == [MUCH] * len(prompts)
        counted = (await fleet.gauges("decode-1"))["decode_precision_tokens"]
        told = [output.num_decode_precision_tokens for output in ended]
        assert 0 < sum(told) == counted
        for output, tokens, num_misfits in zip(ended, expected, told, strict=True):
            assert output.tokens[:NUM_OUTPUT] == tokens or num_misfits > 0
