"""A model with other rotary factors for long requests, which share nodes and steps with others."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.cluster.checkpoints import VOCAB_SIZE, Reference, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.long_requests import LONG_ROPE, SHORT_LEN, with_one_rope

NUM_PROMPT = 216
SHORT, LONG = SHORT_LEN - NUM_PROMPT, SHORT_LEN - NUM_PROMPT + 1  # max_tokens


async def test_each_kind_is_as_transformers_computes_it_also_when_its_node_is_killed(
    tmp_path: Path,
) -> None:
    """They have one prompt, and share none of its KV."""
    path = make_checkpoint(tmp_path / "model", "phi3", vocab_size=VOCAB_SIZE, **LONG_ROPE)
    prompt = make_prompt(NUM_PROMPT)
    short, long = (
        Reference(with_one_rope(path, tmp_path / factors, factors)).greedy(prompt, max_tokens)
        for max_tokens, factors in ((SHORT, "short"), (LONG, "long"))
    )
    assert long[:SHORT] != short
    config = fleet_config(path, decode=2, engine={"token_budget": 37})
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        for num_cached in (0, (NUM_PROMPT - 1) // 16 * 16):
            found = await asyncio.gather(*(client.complete(prompt, n) for n in (SHORT, LONG)))
            assert [output.tokens for output in found] == [short, long]
            assert [output.num_cached_tokens for output in found] == [num_cached] * 2
        followers = [Follower(client, prompt, n, cache_salt="killed") for n in (SHORT, LONG)]
        output = await followers[1].reached(3)
        assert output.decode_node is not None
        await fleet.kill_node(output.decode_node)
        assert [(await follower.end()).tokens for follower in followers] == [short, long]
