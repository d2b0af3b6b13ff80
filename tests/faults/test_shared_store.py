"""Two coordinators that share their stored responses; one of them is killed, then the database."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from pdserve.settings.answers import AnswerConfig
from tests.cluster.client import MODEL
from tests.cluster.fleet import HEARD_S, Fleet, SecondCoordinator, fleet_config, running
from tests.postgres import Postgres

NODES = ("prefill-0", "decode-0")
ASKED: Any = {"model": MODEL, "max_output_tokens": 8, "temperature": 0}
LONG: Any = {
    "input": "go on",
    "background": True,
    **ASKED,
    "temperature": 1,
    "max_output_tokens": 800,
}
LONG["extra_body"] = {"seed": 5}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def url(postgres: Postgres) -> str:
    return await postgres.new_database()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def second(tiny_checkpoint: Path, url: str) -> AsyncIterator[SecondCoordinator]:
    """Not started yet."""
    coordinator = SecondCoordinator(tiny_checkpoint, store=url)
    yield coordinator
    coordinator.release_ports()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tiny_checkpoint: Path, second: SecondCoordinator, url: str) -> AsyncIterator[Fleet]:
    both = [f"--coordinators={second.grpc_address}"]
    config = fleet_config(tiny_checkpoint, answers=AnswerConfig(store=url))
    async with running(Fleet(config, dict.fromkeys(NODES, both))) as fleet:
        yield fleet


def client_of(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


async def ended(client: openai.AsyncOpenAI, response_id: str) -> Any:
    """The response, once nobody makes it any more."""
    async with asyncio.timeout(3 * HEARD_S):
        while True:
            found = await client.responses.retrieve(response_id)
            if found.status not in ("queued", "in_progress"):
                return found
            await asyncio.sleep(0.05)  # nothing tells a client that polls


@pytest.mark.long  # coordinators in one process do by default
async def test_what_a_killed_coordinator_was_asked_another_answers(
    pair: Fleet, second: SecondCoordinator
) -> None:
    async with client_of(pair.url) as one, second, client_of(second.url) as other:
        await second.wait_ready(NODES)
        undisturbed = await ended(one, (await one.responses.create(**LONG)).id)
        talk = await other.conversations.create(metadata={"of": "foxes"})
        told = await other.responses.create(input="hello", conversation=talk.id, **ASKED)
        running_one = await other.responses.create(**LONG)
        await pair.wait_for("decode-0", lambda gauges: gauges["running_requests"] > 0)
        assert (await one.responses.retrieve(running_one.id)).status in ("queued", "in_progress")
        second.child.send_signal(signal.SIGKILL)
        assert await one.responses.retrieve(told.id) == told
        assert len((await one.conversations.items.list(talk.id)).data) == 2
        more = await one.responses.create(input="and?", conversation=talk.id, **ASKED)
        assert more.previous_response_id is None
        again = await ended(one, running_one.id)
        assert (again.status, again.output_text) == (undisturbed.status, undisturbed.output_text)
        assert (again.created_at, again.usage) == (running_one.created_at, undisturbed.usage)
    await pair.assert_baseline()


@pytest.mark.long  # as above
async def test_without_its_database_a_coordinator_answers_what_needs_none(
    pair: Fleet, postgres: Postgres
) -> None:
    chat: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    async with client_of(pair.url) as client:
        told = await client.responses.create(input="hello", **ASKED)
        postgres.kill()
        try:
            with pytest.raises(openai.InternalServerError) as refused:
                await client.responses.retrieve(told.id)
            assert (refused.value.status_code, refused.value.code) == (503, "store_unavailable")
            await client.chat.completions.create(**chat, max_tokens=4)
            await client.responses.create(input="hello", store=False, **ASKED)
        finally:
            postgres.start()
        assert await client.responses.retrieve(told.id) == told
    await pair.assert_baseline()
