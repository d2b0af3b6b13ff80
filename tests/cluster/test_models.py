"""Models behind one endpoint, whose nodes wake as the one that is asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from pdserve.commands.cluster.config import ClusterConfig
from pdserve.settings.answers import AnswerConfig
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny_of
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, SecondCoordinator, models_config, poll, running

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
    async with running(Fleet(models_config(tmp_path))) as fleet, Client(fleet.url) as client:
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


ONE_NODE: Final = """
shared = { decode = 1 }
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


def one_node(folder: Path, **fields: Any) -> ClusterConfig:
    """Three models and one node, which is `a`'s at first."""
    for seed, source in enumerate(("one", "two", "three")):
        make_tiny_of(folder / source, seed=seed)
    (folder / "models.toml").write_text(ONE_NODE)
    return models_config(folder, mode="colocated", **fields)


def answers(folder: Path, prompt: list[int]) -> dict[str, list[int]]:
    """What each of the three says to a prompt."""
    sources = {"a": "one", "b": "two", "c": "three"}
    return {name: Reference(folder / path).greedy(prompt, 12) for name, path in sources.items()}


@pytest.mark.long
async def test_a_model_that_cannot_be_woken_is_refused_and_the_others_are_served(
    tmp_path: Path,
) -> None:
    """Its entry means other files by now, or is gone with the file; its weights are cut off."""
    prompt, file = make_prompt(70), tmp_path / "models.toml"
    fleet = Fleet(one_node(tmp_path))
    expected = answers(tmp_path, prompt)
    async with running(fleet), Client(fleet.url) as client:
        weights = tmp_path / "three" / "model.safetensors"
        whole = weights.read_bytes()
        pid = fleet.pid("decode-0")

        async def is_refused(name: str) -> None:
            stream = asyncio.create_task(client.complete(prompt, 300, model="a"))
            answer = await client.complete(prompt, 12, model=name)
            assert (answer.status, answer.error and answer.error["code"]) == (
                503,
                "no_node_available",
            ), answer
            assert (await stream).tokens[:12] == expected["a"]
            assert (await client.complete(prompt, 12, model="a")).tokens == expected["a"]

        async def comes_back(name: str) -> None:
            async def is_back() -> bool:
                answer = await client.complete(prompt, 12, model=name)
                assert answer.error is not None or answer.tokens == expected[name]
                return answer.error is None

            await poll(is_back, 90.0, lambda: f"{name} is still refused")

        file.write_text(ONE_NODE.replace('"two"', '"three"'))
        await is_refused("b")
        file.write_text("[models")
        await is_refused("b")
        file.write_text(ONE_NODE)
        weights.chmod(0o644)
        weights.write_bytes(whole[: len(whole) // 2])
        await is_refused("c")
        await comes_back("b")
        weights.write_bytes(whole)
        await comes_back("c")
        assert fleet.pid("decode-0") == pid, "it has lived through all that"


@pytest.mark.long
async def test_embeddings_and_scores_wake_a_model_too(tmp_path: Path) -> None:
    fleet = Fleet(one_node(tmp_path, answers=AnswerConfig(scoring="cosine")))
    async with running(fleet):
        pair = {"query": "a fox", "documents": ["a hen", "the fox"]}
        calls: dict[str, dict[str, Any]] = {
            "embeddings": {"input": "a fox and a hen"},
            "rerank": pair,
            "score": {"text_1": "a fox", "text_2": ["a hen", "the fox"]},
        }
        async with aiohttp.ClientSession(fleet.url) as session:

            async def ask(path: str, name: str) -> Any:
                body = calls[path] | {"model": name}
                async with session.post(f"/v1/{path}", json=body) as response:
                    answer = await response.json()
                    assert response.status == 200, answer
                    return answer["results" if path == "rerank" else "data"]

            for path in calls:
                of_a, of_b = await ask(path, "a"), await ask(path, "b")
                assert of_a != of_b
                assert await asyncio.gather(*(ask(path, name) for name in "abab")) == [
                    of_a,
                    of_b,
                    of_a,
                    of_b,
                ]


@pytest.mark.long
async def test_two_coordinators_wake_models_at_once(tmp_path: Path) -> None:
    """Different ones and the same; the one that leads wakes first, and none waits for ever."""
    config, prompt = one_node(tmp_path), make_prompt(70)
    expected = answers(tmp_path, prompt)
    second = SecondCoordinator(None, models=config.models, mode="colocated")
    fleet = Fleet(config, {"decode-0": [f"--coordinators={second.grpc_address}"]})
    try:
        async with (
            running(fleet),
            second,
            Client(fleet.url) as client,
            Client(second.url) as other,
        ):
            await second.wait_ready(["decode-0"])
            for pair in ("bc", "cb", "aa", "bb", "ca"):
                calls = zip((client, other), pair, strict=True)
                told = await asyncio.gather(*(c.complete(prompt, 12, model=m) for c, m in calls))
                assert [answer.tokens for answer in told] == [expected[name] for name in pair]
    finally:
        second.release_ports()
