"""Models, health, metrics, status."""

from __future__ import annotations

import openai

from pdserve.protocol.status import read_status
from tests.fakes.generator import MODEL, FakeGenerator
from tests.fakes.statuses import node_status
from tests.unit.coordinator.api.harness import served


async def test_models_are_listed_under_all_their_names() -> None:
    async with served() as api, openai.AsyncOpenAI(base_url=api.base_url, api_key="-") as client:
        listed = [model.id async for model in client.models.list()]
        async with api.client.get(f"/v1/models/{MODEL}") as response:
            body = await response.json()
        alias = await client.models.retrieve("alias")
    assert listed == [MODEL, "alias"]
    assert alias.id == "alias"
    assert body["object"] == "model"
    assert body["max_model_len"] == 512
    assert (body["root"], body["parent"]) == (MODEL, None), "as vLLM has them"
    assert isinstance(body["created"], int)


async def test_every_name_is_answered_to() -> None:
    async with served() as api, api.chat(model="alias") as response:
        assert (await response.json())["model"] == "alias"


async def test_health_follows_the_cluster() -> None:
    async with served(FakeGenerator(ready=False)) as api:
        async with api.client.get("/health") as response:
            assert response.status == 503
        api.generator.ready = True
        async with api.client.get("/health") as response:
            assert response.status == 200


async def test_metrics_and_status() -> None:
    async with served() as api:
        async with api.client.get("/metrics") as response:
            assert response.content_type == "text/plain"
            assert await response.read() == b"pdserve_up 1\n"
        async with api.client.get("/status") as response:
            assert read_status(await response.read()) == api.generator.status()


async def test_prometheus_is_told_where_the_nodes_are() -> None:
    nodes = [node_status("a", "prefill"), node_status("b", "decode")]
    async with served(FakeGenerator(nodes=nodes)) as api, api.client.get("/metrics/targets") as got:
        assert got.content_type == "application/json"
        told = await got.json()
    assert told == [
        {"targets": ["a:2"], "labels": {"node": "a", "role": "prefill"}},
        {"targets": ["b:2"], "labels": {"node": "b", "role": "decode"}},
    ]
