"""Two models behind one endpoint, whose nodes wake as the one that is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

from msgspec.structs import replace

from pdserve.settings.config import CheckpointConfig
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny_of
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, poll, running

FILE = """
shared = { prefill = 1, decode = 1 }
[models.a]
source = "one"
aliases = ["first"]
min = {}
[models.b]
source = "two"
min = {}
"""


async def test_nodes_wake_as_the_model_that_is_asked_for(tmp_path: Path) -> None:
    paths = {"a": make_tiny_of(tmp_path / "one"), "b": make_tiny_of(tmp_path / "two", seed=7)}
    (tmp_path / "models.toml").write_text(FILE)
    prompt = make_prompt(70)
    expected = {name: Reference(path).greedy(prompt, 12) for name, path in paths.items()}
    assert expected["a"] != expected["b"]
    config = replace(
        fleet_config(tmp_path),
        checkpoint=CheckpointConfig(),
        models=str(tmp_path / "models.toml"),
    )
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        assert (await client.complete(prompt, 12, model="first")).tokens == expected["a"]
        unknown = await client.complete(prompt, 12, model="c")
        assert unknown.error is not None
        assert (unknown.status, unknown.error["code"]) == (404, "model_not_found")

        # Both at once: the second one wakes when the first one's requests are done.
        names = ["a", "b", "a", "b"]
        outputs = await asyncio.gather(*(client.complete(prompt, 12, model=n) for n in names))
        assert [output.tokens for output in outputs] == [expected[name] for name in names]

        # A node that dies as it wakes comes back as what it was at first, and wakes again.
        status = await fleet.status()
        asked = "b" if status.nodes[0].model == "a" else "a"
        num_lines = len(fleet.lines)
        waiting = asyncio.create_task(client.complete(prompt, 12, model=asked))

        async def is_waking() -> bool:
            told = fleet.lines[num_lines:]
            return any(name == "decode-0" and "to become one of" in line for name, line in told)

        await poll(is_waking, 20.0, lambda: "no node was asked to become another")
        await fleet.kill_node("decode-0")
        await fleet.start_node("decode-0")
        assert (await waiting).tokens == expected[asked]
        nodes = (await fleet.status()).nodes
        assert {node.model for node in nodes} == {asked}
