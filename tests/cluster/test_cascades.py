"""A cascade of two models: whose tokens they are, whatever dies in the middle of them."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve.protocol.status import NodeStatus
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny_of
from tests.cluster.client import EventStream
from tests.cluster.fleet import HEARD_S, Fleet, SecondCoordinator, models_config, poll, running
from tests.matrix import matrix

NODES = ("decode-0", "decode-1", "decode-2")  # the last two are the large model's
LONG = 600
# Their answers are not sure of anything; nor would any be.
FILE = """
[models.small]
source = "one"
min = { decode = 1 }
[models.large]
source = "two"
min = { decode = 2 }
[cascades.unsure]
tiers = [{ model = "small", escalate = { mean_logprob = -0.001, first_tokens = 4 } },
         { model = "large" }]
[cascades.content]
tiers = [{ model = "small", escalate = { margin = 0.0 } }, { model = "large" }]
"""


@pytest.mark.parametrize("kills", matrix([False, True], 1))
async def test_one_model_answers_whatever_dies(kills: bool, tmp_path: Path) -> None:
    paths = {
        "small": make_tiny_of(tmp_path / "one"),
        "large": make_tiny_of(tmp_path / "two", seed=7),
    }
    (tmp_path / "models.toml").write_text(FILE)
    prompt = make_prompt(70)
    expected = {name: Reference(path).greedy(prompt, 12) for name, path in paths.items()}
    config = models_config(tmp_path, mode="colocated")
    second = SecondCoordinator(None, models=config.models, mode="colocated")
    both = [f"--coordinators={second.grpc_address}"]
    fleet = Fleet(config, dict.fromkeys(NODES, both), restarts=True)
    try:
        async with running(fleet), second:
            await second.wait_ready(NODES)
            await _answers(fleet, prompt, expected)
            if kills:  # in one process its tier is gone on with by default
                await _goes_on(fleet, second, prompt)
    finally:
        second.release_ports()


async def _answers(fleet: Fleet, prompt: list[int], expected: dict[str, list[int]]) -> None:
    asked: Any = {"prompt": prompt, "max_tokens": 12, "temperature": 0}
    extra = {"return_token_ids": True, "ignore_eos": True}
    async with openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="-", max_retries=0) as sdk:
        for name, tier in ("unsure", "large"), ("content", "small"):
            answer = await sdk.completions.create(model=name, extra_body=extra, **asked)
            assert answer.choices[0].model_extra is not None
            assert answer.choices[0].model_extra["token_ids"] == expected[tier]
            assert answer.model == tier
            assert answer.usage is not None
            assert answer.usage.model_extra is not None
            tiers = answer.usage.model_extra["tiers"]
            assert [one["model"] for one in tiers] == ["small", "large"][: len(tiers)]
            assert tiers[-1]["completion_tokens"] == answer.usage.completion_tokens == 12
            assert {one["prompt_tokens"] for one in tiers} == {70}


async def _goes_on(fleet: Fleet, second: SecondCoordinator, prompt: list[int]) -> None:
    """A node dies, then the coordinator; the rest comes from the other one."""
    fields: Any = {"key": "k", "model": "unsure", "prompt": prompt, "max_tokens": LONG, "seed": 5}
    whole = EventStream(fleet.url, **fields | {"key": "alone"})
    await whole.read(0)
    assert len(whole.token_ids) == LONG

    killing: list[asyncio.Task[None]] = []

    busy: list[NodeStatus] = []

    async def is_seen() -> bool:
        nodes = (await fleet.status()).nodes
        busy[:] = [node for node in nodes if node.running_requests]
        return len(busy) == 1

    async def kill() -> None:
        await poll(is_seen, HEARD_S, lambda: f"busy: {busy}")
        assert busy[0].model == "large"
        await fleet.kill_node(busy[0].node_id)

    stream = EventStream(second.url, **fields)
    await stream.read(20, lambda: killing.append(asyncio.create_task(kill())))
    await asyncio.gather(*killing)
    assert stream.is_done
    assert stream.token_ids == whole.token_ids

    fields["key"] = "another"
    cut = EventStream(second.url, **fields)
    await cut.read(20, lambda: second.child.send_signal(signal.SIGKILL))
    assert 20 <= len(cut.token_ids) < LONG
    assert cut.last_id.startswith("t")
    rest = EventStream(fleet.url, last_id=cut.last_id, **fields)
    await rest.read(0)
    assert rest.is_done
    assert cut.token_ids + rest.token_ids == whole.token_ids
