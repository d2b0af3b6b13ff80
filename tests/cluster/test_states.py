"""Models with states (Qwen3-Next), with real processes: handed off, moved, and computed anew."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.checkpoints import make_checkpoint
from tests.cluster.checkpoints import MAX_MODEL_LEN, VOCAB_SIZE, Reference, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running

STREAMED = 250


async def test_states_go_with_their_streams(tmp_path: Path) -> None:
    """Prompts are handed off, one of them to two siblings; then a decode node is drained."""
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    path = make_checkpoint(tmp_path / "model", "qwen3_next", **sizes)
    reference = Reference(path)
    prompts = [make_prompt(length) for length in (3, 64, 150)]
    async with (
        running(Fleet(fleet_config(path, prefill=1, decode=2))) as fleet,
        Client(fleet.url) as client,
    ):
        outputs = await asyncio.gather(*(client.stream_all(prompt, 24) for prompt in prompts))
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == reference.greedy(prompt, 24)
        one, other = await client.answers(prompts[1], 24, n=2, seed=1)
        assert one.token_ids == other.token_ids == outputs[1].token_ids
        expected = await asyncio.gather(
            *(client.stream_all(prompt, STREAMED) for prompt in prompts)
        )
        followers = [Follower(client, prompt, STREAMED) for prompt in prompts * 2]
        await asyncio.gather(*(follower.reached(3) for follower in followers))
        assert (await fleet.drain_node("decode-0")).returncode == 0
        moved = [await follower.end() for follower in followers]
        assert [each.tokens for each in moved] == [each.tokens for each in expected * 2]
        assert {each.decode_node for each in moved} == {"decode-0", "decode-1"}
