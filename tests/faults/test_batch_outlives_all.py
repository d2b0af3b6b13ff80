"""A batch of ten thousand lines, whose coordinator is killed three times, and then everything."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from pdserve.commands.cluster.plan import COORDINATOR
from pdserve.settings.answers import AnswerConfig
from tests.cluster.client import MODEL
from tests.cluster.fleet import Fleet, fleet_config, poll, running

NUM_LINES = 10_000
NUM_PROMPTS = 25  # that they share
WITHIN_S = 900.0  # about a minute on idle cores
STEP = 1_500  # lines between two kills

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * WITHIN_S)]


def line(number: int) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": f"Fox {number % NUM_PROMPTS}", "temperature": 0}
    body |= {"max_tokens": 4, "ignore_eos": True}
    return {"custom_id": f"n{number}", "method": "POST", "url": "/v1/completions", "body": body}


@asynccontextmanager
async def machine(
    checkpoint: Path, folder: Path
) -> AsyncIterator[tuple[Fleet, openai.AsyncOpenAI]]:
    """A cluster on a disk that outlives it."""
    config = fleet_config(checkpoint, answers=AnswerConfig(store=str(folder / "store.sqlite")))
    async with (
        running(Fleet(config)) as fleet,
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="-", max_retries=0) as client,
    ):
        yield fleet, client


async def num_done(client: openai.AsyncOpenAI, batch_id: str) -> int:
    counts = (await client.batches.retrieve(batch_id)).request_counts
    assert counts is not None
    assert counts.failed == 0
    return counts.completed


async def test_every_line_is_there_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    begun_s, done, batch_id = time.monotonic(), 0, ""

    async def further(client: openai.AsyncOpenAI) -> None:
        async def look() -> bool:
            return await num_done(client, batch_id) >= done + STEP

        await poll(look, WITHIN_S, lambda: f"{STEP} lines after {done}")

    async with machine(tiny_checkpoint, tmp_path) as (fleet, client):
        text = "\n".join(json.dumps(line(number)) for number in range(NUM_LINES)).encode()
        given = await client.files.create(file=("lines.jsonl", text), purpose="batch")
        made = await client.batches.create(
            input_file_id=given.id, endpoint="/v1/completions", completion_window="24h"
        )
        batch_id = made.id
        for _ in range(3):
            await further(client)
            await fleet.kill_node(COORDINATOR)
            await fleet.start_node(COORDINATOR)
            await fleet.wait_back()
            before, done = done, await num_done(client, batch_id)
            assert before < done < NUM_LINES
        await further(client)
        for name in (COORDINATOR, *fleet.node_names):
            await fleet.kill_node(name)

    async with machine(tiny_checkpoint, tmp_path) as (_, client):
        assert done < await num_done(client, batch_id) < NUM_LINES
        async with asyncio.timeout(WITHIN_S):
            while (batch := await client.batches.retrieve(batch_id)).status != "completed":
                assert batch.status in ("in_progress", "finalizing"), batch
                await asyncio.sleep(0.2)  # nothing tells a client that polls
        assert batch.output_file_id is not None
        assert batch.error_file_id is None
        output = (await client.files.content(batch.output_file_id)).text
    answers = [json.loads(one) for one in output.splitlines()]
    assert sorted(one["custom_id"] for one in answers) == sorted(f"n{n}" for n in range(NUM_LINES))
    assert len({one["response"]["body"]["id"] for one in answers}) == NUM_LINES
    texts: dict[int, set[str]] = {}
    for one in answers:
        said = one["response"]["body"]["choices"][0]["text"]
        texts.setdefault(int(one["custom_id"][1:]) % NUM_PROMPTS, set()).add(said)
    assert [len(said) for said in texts.values()] == [1] * NUM_PROMPTS, "whoever answered"
    assert time.monotonic() - begun_s < WITHIN_S
