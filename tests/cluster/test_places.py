"""Models that share a node: several are awake there at once, in one memory, step by step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from pdserve.settings.config import CheckpointConfig, ClusterMode
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny_of
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.matrix import matrix

FILE = """
shared = { prefill = 1, decode = 1, at_once = 2, memory = "24MiB" }
[models.a]
source = "one"
min = {}
[models.b]
source = "two"
min = {}
[models.c]
source = "three"
min = {}
"""


@pytest.mark.parametrize("mode", matrix(["colocated", "disaggregated", "adaptive"], 1))
async def test_two_models_are_awake_on_one_node(mode: ClusterMode, tmp_path: Path) -> None:
    sources = {"a": "one", "b": "two", "c": "three"}
    paths = {
        name: make_tiny_of(tmp_path / folder, seed=seed)
        for seed, (name, folder) in enumerate(sources.items())
    }
    (tmp_path / "models.toml").write_text(FILE)
    prompt = make_prompt(70)
    expected = {name: Reference(path).greedy(prompt, 12) for name, path in paths.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    config = replace(
        fleet_config(tmp_path, mode=mode),
        checkpoint=CheckpointConfig(),
        models=str(tmp_path / "models.toml"),
    )
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        nodes = (await fleet.status()).nodes
        pools = ["decode"] if mode == "colocated" else ["prefill", "decode"]
        assert {(node.model, node.place_of) for node in nodes} == {
            (model, f"shared-{pool}-0") for model in "ab" for pool in pools
        }
        names = ["a", "b"] * 4
        outputs = await asyncio.gather(*(client.complete(prompt, 12, model=n) for n in names))
        assert [output.tokens for output in outputs] == [expected[name] for name in names]
        assert {(node.node_id, node.incarnation) for node in (await fleet.status()).nodes} == {
            (node.node_id, node.incarnation) for node in nodes
        }, "nobody had to wake"

        # One dies while both compute: the other one goes on, also with the turn and the memory.
        streams = [asyncio.create_task(client.complete(prompt, 12, model="b")) for _ in range(4)]
        await fleet.kill_node("decode-0")
        assert [(await stream).tokens for stream in streams] == [expected["b"]] * 4
        await fleet.start_node("decode-0")

        # A third one takes a place, and the other stays.
        assert (await client.complete(prompt, 12, model="c")).tokens == expected["c"]
        nodes = (await fleet.status()).nodes
        assert all(
            len({node.model for node in nodes if node.role == pool}) == 2 for pool in pools
        ), "a model has one place of a node"
        gauges = await fleet.gauges("decode-0")
        assert gauges["place_memory_bytes"] == 24 << 20
