"""Models that share a node: several are awake there at once, in one memory, step by step."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from random import Random

import pytest

from pdserve.settings.config import ClusterMode
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny_of
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, models_config, running
from tests.matrix import matrix

FILE = """
shared = { prefill = 1, decode = 1, at_once = 2, memory = "MEMORY" }
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


def made(folder: Path, memory: str) -> dict[str, Path]:
    """The models and their file."""
    sources = {"a": "one", "b": "two", "c": "three"}
    (folder / "models.toml").write_text(FILE.replace("MEMORY", memory))
    return {
        name: make_tiny_of(folder / source, seed=seed)
        for seed, (name, source) in enumerate(sources.items())
    }


@pytest.mark.parametrize("mode", matrix(["colocated", "disaggregated", "adaptive"], 1))
async def test_two_models_are_awake_on_one_node(mode: ClusterMode, tmp_path: Path) -> None:
    paths = made(tmp_path, "24MiB")
    prompt = make_prompt(70)
    expected = {name: Reference(path).greedy(prompt, 12) for name, path in paths.items()}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    async with (
        running(Fleet(models_config(tmp_path, mode=mode))) as fleet,
        Client(fleet.url) as client,
    ):
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


@pytest.mark.long
async def test_places_die_and_stand_still_under_load(tmp_path: Path) -> None:
    """Prompts of three models in memory for a few of them, while places come and go."""
    paths, random = made(tmp_path, "2MiB"), Random(7)
    prompts = [make_prompt(300 + 50 * number, seed=number) for number in range(4)]
    references = {name: Reference(path) for name, path in paths.items()}
    expected = {
        (name, number): reference.greedy(prompt, 24)
        for name, reference in references.items()
        for number, prompt in enumerate(prompts)
    }
    fleet = Fleet(
        models_config(tmp_path, mode="colocated", engine={"max_model_len": 1024}), restarts=True
    )
    async with running(fleet), Client(fleet.url) as client:

        async def ask() -> None:
            for _ in range(8):
                name, number = random.choices("abc", (6, 3, 1))[0], random.randrange(4)
                answer = await client.complete(prompts[number], 24, model=name)
                assert answer.tokens == expected[name, number], (name, number, answer.error)

        calls = [asyncio.create_task(ask()) for _ in range(6)]
        for number in range(4):
            await asyncio.sleep(1.0)
            victim = random.choice(fleet.node_names)
            if number % 2:
                fleet.send_signal(victim, signal.SIGSTOP)
                await asyncio.sleep(1.0)
                fleet.send_signal(victim, signal.SIGCONT)
            else:
                await fleet.kill_node(victim)
                await fleet.start_node(victim)
        await asyncio.gather(*calls)
