"""Models with states (Qwen3-Next), with real processes: handed off, moved, and computed anew."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pdserve.settings.config import Mode
from pdserve.settings.prefixes import PrefixConfig
from tests.checkpoints import make_checkpoint
from tests.cluster.checkpoints import MAX_MODEL_LEN, VOCAB_SIZE, Reference, make_prompt
from tests.cluster.client import Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running

STREAMED = 250
# The reference computes states in plain torch, which takes most of the time: 102 s at load 20.
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": MAX_MODEL_LEN}
    return make_checkpoint(tmp_path_factory.mktemp("states") / "model", "qwen3_next", **sizes)


async def test_states_go_with_their_streams(model: Path) -> None:
    """Prompts are handed off, one of them to two siblings; then a decode node is drained.

    And a turn goes on behind a state that only the node has which decoded the one before.
    """
    reference = Reference(model)
    prompts = [make_prompt(length) for length in (3, 64, 150)]
    config = fleet_config(model, prefill=1, decode=2, prefix=PrefixConfig(prefix_pull="always"))
    async with (
        running(Fleet(config)) as fleet,
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
        turn = [*prompts[2], *expected[2].token_ids, *make_prompt(20)]
        answer = await client.stream_all(turn, 8)
        assert answer.token_ids == reference.greedy(turn, 8)
        assert answer.num_cached_tokens == 256, "where answers keep states"
        assert (await fleet.gauges("prefill-0"))["prefix_tokens"] == 256 - 144
        followers = [Follower(client, prompt, STREAMED) for prompt in prompts * 2]
        await asyncio.gather(*(follower.reached(3) for follower in followers))
        assert (await fleet.drain_node("decode-0")).returncode == 0
        moved = [await follower.end() for follower in followers]
        assert [each.tokens for each in moved] == [each.tokens for each in expected * 2]
        assert {each.decode_node for each in moved} == {"decode-0", "decode-1"}


@pytest.mark.long
@pytest.mark.parametrize("mode", ["flowing", "colocated", "multiplexed", "adaptive"])
async def test_all_modes_answer_alike(mode: Mode, model: Path) -> None:
    """In a pool of little more than two streams, so that some are preempted."""
    reference = Reference(model)
    prompts = [make_prompt(length, length) for length in (5, 40, 130, 300, 17, 211)]
    nodes = {"decode": 2} if mode == "colocated" else {"prefill": 1, "decode": 1}
    engine: dict[str, Any] = {"kv_memory": "600KiB", "max_model_len": 1024}
    if mode == "multiplexed":
        nodes, engine = {"decode": 1}, engine | {"threads": 2}
    async with (
        running(Fleet(fleet_config(model, mode=mode, engine=engine, **nodes))) as fleet,
        Client(fleet.url) as client,
    ):
        outputs = await asyncio.gather(*(client.stream_all(prompt, 200) for prompt in prompts))
        answers = await client.answers(prompts[1], 24, n=2, seed=1)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.token_ids == reference.greedy(prompt, 200)
    assert [each.token_ids for each in answers] == [outputs[1].token_ids[:24]] * 2


@pytest.mark.long
async def test_kills_and_later_turns_change_no_token(model: Path) -> None:
    """The node that decodes streams with states is killed; later turns begin with snapshots."""
    prompts = [make_prompt(length, length) for length in (70, 150)]
    async with (
        running(Fleet(fleet_config(model, prefill=1, decode=2))) as fleet,
        Client(fleet.url) as client,
    ):
        expected = [await client.stream_all(prompt, STREAMED) for prompt in prompts]
        again = [await client.stream_all(prompt, STREAMED) for prompt in prompts]
        assert [each.tokens for each in again] == [each.tokens for each in expected]
        assert [each.num_cached_tokens for each in again] == [64, 144]
        followers = [Follower(client, prompt, STREAMED) for prompt in prompts * 2]
        await asyncio.gather(*(follower.reached(3) for follower in followers))
        await fleet.kill_node("decode-0")
        moved = [await follower.end() for follower in followers]
        assert [each.tokens for each in moved] == [each.tokens for each in expected * 2]
        turn = [*prompts[1], *expected[1].token_ids, *make_prompt(20)]
        answer = await client.stream_all(turn, 24)
        assert answer.num_cached_tokens >= 144
    assert answer.token_ids == Reference(model).greedy(turn, 24)


@pytest.mark.long
async def test_kills_in_flowing_mode_change_no_token(model: Path) -> None:
    """Of a node of each pool, while streams are on either, or on their way."""
    prompts = [make_prompt(length, length) for length in (70, 150)]
    async with (
        running(Fleet(fleet_config(model, mode="flowing", prefill=2, decode=2))) as fleet,
        Client(fleet.url) as client,
    ):
        expected = [await client.stream_all(prompt, STREAMED) for prompt in prompts]
        followers = [Follower(client, prompt, STREAMED) for prompt in prompts * 2]
        await asyncio.gather(*(follower.reached(3) for follower in followers))
        await fleet.kill_node("prefill-0")
        await fleet.kill_node("decode-0")
        moved = [await follower.end() for follower in followers]
    assert [each.tokens for each in moved] == [each.tokens for each in expected * 2]
