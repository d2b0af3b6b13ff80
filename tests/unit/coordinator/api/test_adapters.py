"""Adapters as callers see them: who may load and use which, and what is answered to whom."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from coordinator.adapters.table import SCHEMA, AdapterTable
from coordinator.jobs.storage.database import SqliteDatabase
from coordinator.tenants import Tenants
from coordinator.tenants.opening import open_tenants
from pdserve.settings.access import AccessConfig, hash_key
from pdserve.settings.config import CoordinatorConfig
from pdserve.shared.clock import ManualClock
from tests.fakes.generator import MODEL
from tests.unit.coordinator.adapters.played import FILES, PlayedCluster
from tests.unit.coordinator.api.harness import Harness, is_error_body, served

KEYS = f"""
[tenants.operator]
keys = ["{hash_key("operator")}"]
is_operator = true
[tenants.loader]
keys = ["{hash_key("loader")}"]
adapters = ["own-*", "shared"]
max_adapters = 1
[tenants.user]
keys = ["{hash_key("user")}"]
adapters = ["shared"]
"""
A, B = FILES["/a"], FILES["/b"]


@pytest.fixture
def tenants(tmp_path: Path) -> Tenants:
    file = tmp_path / "keys.toml"
    file.write_text(KEYS)
    config = CoordinatorConfig(access=AccessConfig(key_file=str(file), usage_db="memory"))
    return open_tenants(config, ("standard",), MODEL, {}, ManualClock(0.0))


async def post(api: Harness, path: str, key: str = "", **body: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with api.client.post(path, json=body, headers=headers) as response:
        is_json = response.content_type == "application/json"
        return response.status, await (response.json() if is_json else response.text())


async def load(api: Harness, name: str, key: str = "", path: str = "/a") -> int:
    status, said = await post(api, "/v1/load_lora_adapter", key, lora_name=name, lora_path=path)
    assert status == 200 or is_error_body(said)
    return status


async def listed(api: Harness, key: str) -> list[str]:
    async with openai.AsyncOpenAI(base_url=api.base_url, api_key=key) as sdk:
        return [model.id for model in (await sdk.models.list()).data]


async def test_every_endpoint_generates_with_the_adapter_of_its_model() -> None:
    cluster = PlayedCluster()
    cluster.pair()
    async with served(adapters=cluster.adapters) as api:
        assert await load(api, "sql") == 200
        message = [{"role": "user", "content": "Hi"}]
        calls: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": message},
            "/v1/completions": {"prompt": "Hi", "n": 2},
            "/v1/messages": {"messages": message, "max_tokens": 9},
            "/v1/responses": {"input": "Hi"},
            "/v1/embeddings": {"input": "Hi"},
        }
        for path, body in calls.items():
            for model, digest in (("sql", A), (MODEL, "")):
                api.generator.generations.clear()
                status, said = await post(api, path, model=model, **body)
                assert status == 200, said
                assert said.get("model", model) == model
                started = [one.request.prompt.adapter for one in api.generator.generations]
                assert started
                assert set(started) == {digest}, (path, model)


async def test_who_may_load_and_use_what(tenants: Tenants) -> None:
    cluster = PlayedCluster()
    cluster.pair()
    async with served(tenants=tenants, adapters=cluster.adapters) as api:
        assert await load(api, "shared", "user") == 403
        assert await load(api, "shared", "operator") == 200
        assert await load(api, "foreign", "operator", "/b") == 200
        assert await load(api, "other", "loader") == 403
        assert await load(api, "own-1", "loader", "/b") == 200
        assert await load(api, "own-2", "loader") == 409
        base = [MODEL, "alias"]
        assert await listed(api, "operator") == [*base, "shared", "foreign", "own-1"]
        assert await listed(api, "loader") == [*base, "shared", "own-1"]
        assert await listed(api, "user") == [*base, "shared"]
        for name, status in (("shared", 200), ("foreign", 404), ("own-1", 404)):
            found = await post(api, "/v1/completions", "user", model=name, prompt="Hi")
            assert found[0] == status
        unload = "/v1/unload_lora_adapter"
        assert (await post(api, unload, "loader", lora_name="shared"))[0] == 403
        assert (await post(api, unload, "loader", lora_name="foreign"))[0] == 404
        assert (await post(api, unload, "loader", lora_name="own-1"))[0] == 200
        assert (await post(api, unload, "operator", lora_name="shared"))[0] == 200
        assert await listed(api, "user") == base


async def test_a_call_made_again_under_its_key_keeps_the_version_it_began_with() -> None:
    cluster = PlayedCluster()
    cluster.pair()
    async with served(adapters=cluster.adapters) as api:
        await load(api, "sql")
        body = {"model": "sql", "prompt": "Hi"}
        headers = {"Idempotency-Key": "k"}
        for _ in range(2):
            async with api.client.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                await response.read()
            await cluster.adapters.load("sql", "/b", in_place=True)
        assert [one.request.prompt.adapter for one in api.generator.generations] == [A, A]
        assert (await post(api, "/v1/completions", **body))[0] == 200
        assert api.generator.last.request.prompt.adapter == B


async def test_names_are_there_again_after_a_restart_and_for_others(tmp_path: Path) -> None:
    file = tmp_path / "jobs"

    def opened() -> AdapterTable:
        return AdapterTable(SqliteDatabase(file, SCHEMA), "m")

    first, second = PlayedCluster(), PlayedCluster()
    first.pair()
    await first.adapters.follow(opened())
    version = await first.adapters.load("sql", "/a")
    taken = replace(version, owner="other", digest=B)
    assert not await opened().put(taken, in_place=True, own_only=True)
    nodes = second.pair()
    await second.adapters.follow(opened())
    assert second.adapters.find("sql") == version
    assert not second.router.can_route("", A)
    third = second.join("d2", nodes[1].member.role)  # type: ignore[union-attr]
    newer = await first.adapters.load("sql", "/b", in_place=True)
    await second.adapters.look()
    assert second.adapters.find("sql") == newer
    await first.adapters.unload("sql")
    await second.adapters.look()
    assert second.adapters.find("sql") is None
    assert third.legs == []
