"""A rollout of other weights under load: beside the old ones, then instead of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from pdserve.commands.cli.running import revisions
from pdserve.model_files.checkpoint import resolve_checkpoint
from pdserve.settings.config import RoutingConfig
from tests.checkpoints import make_checkpoint
from tests.cluster.checkpoints import VOCAB_SIZE, Reference, make_prompt, make_tiny
from tests.cluster.client import MODEL, Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running

OLD, NEW = {"prefill-0", "decode-0"}, {"prefill-1", "decode-1"}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two checkpoints of one name and shape."""
    folder = tmp_path_factory.mktemp("revisions")
    new = make_checkpoint(
        folder / "new" / "model",
        "llama",
        seed=7,
        vocab_size=VOCAB_SIZE,
        max_position_embeddings=4096,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    return {"old": make_tiny(folder / "old" / "model"), "new": new}


@pytest.fixture(scope="module")
def names(weights: dict[str, Path]) -> dict[str, str]:
    """The first characters of both revisions."""
    return {name: resolve_checkpoint(str(path)).revision[:8] for name, path in weights.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(weights: dict[str, Path], names: dict[str, str]) -> AsyncIterator[Fleet]:
    shares = [f"{names['old']}=1", f"{names['new']}=0"]
    routing = RoutingConfig(router="round-robin", admission=False, revision_shares=shares)
    config = fleet_config(weights["old"], prefill=2, decode=2, routing=routing)
    model = [f"--model={weights['new']}"]
    async with running(Fleet(config, dict.fromkeys(NEW, model))) as fleet:
        yield fleet


async def share(fleet: Fleet, names: dict[str, str], **shares: float) -> None:
    """As `pdserve revisions` does."""
    given = [f"{names[name]}={number}" for name, number in shares.items()]
    assert await asyncio.to_thread(revisions.run, fleet.url, given) == 0


async def chat(session: aiohttp.ClientSession, fleet: Fleet, *texts: str) -> set[str]:
    """The nodes that serve the next turn of a conversation."""
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"model": MODEL, "messages": messages, "max_tokens": 3}
    async with session.post(f"{fleet.url}/v1/chat/completions", json=body) as response:
        assert response.status == 200, await response.text()
        kinds = ("prefill", "decode")
        return {response.headers[f"x-pdserve-{kind}-node"] for kind in kinds}


async def test_a_rollout(
    fleet: Fleet,
    weights: dict[str, Path],
    names: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompt = make_prompt(70)
    expected = {name: Reference(path).greedy(prompt, 12) for name, path in weights.items()}
    assert expected["old"] != expected["new"]
    async with Client(fleet.url) as client, aiohttp.ClientSession() as session:
        # Attached, but without a share.
        for _ in range(3):
            assert (await client.complete(prompt, 12)).tokens == expected["old"]

        # Side by side: each conversation stays where it began, and no KV is mixed.
        await share(fleet, names, old=1, new=1)
        first = {i: await chat(session, fleet, f"hello {i}") for i in range(12)}
        assert {frozenset(nodes) for nodes in first.values()} == {frozenset(OLD), frozenset(NEW)}
        for i, nodes in first.items():
            assert await chat(session, fleet, f"hello {i}", "well", "and?") == nodes
        outputs = await asyncio.gather(*(client.complete(prompt, 12) for _ in range(16)))
        for output in outputs:
            nodes = {output.prefill_node, output.decode_node}
            assert nodes in (OLD, NEW)
            assert output.tokens == expected["old" if nodes == OLD else "new"]
        table = capsys.readouterr().out
        assert names["old"] in table
        assert names["new"] in table

        # Over to the new ones; what runs ends where it is, also while its nodes drain.
        await share(fleet, names, old=1, new=0)
        streams = [Follower(client, make_prompt(30, i), 120) for i in range(4)]
        for stream in streams:
            await stream.reached(2)
        await share(fleet, names, old=0, new=1)
        assert (await client.complete(prompt, 12)).tokens == expected["new"]
        await asyncio.gather(*(fleet.drain_node(name) for name in sorted(OLD)))
        reference = Reference(weights["old"])
        for i, stream in enumerate(streams):
            assert (await stream.end()).tokens == reference.greedy(make_prompt(30, i), 120)
        await share(fleet, names, new=1)
        assert (await client.complete(prompt, 12)).tokens == expected["new"]
