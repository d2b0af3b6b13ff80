"""Adapters through the official client library: the tokens of merged weights, whoever dies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from pdserve.settings.answers import AnswerConfig
from tests.adapters import make_adapter, merged
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny
from tests.cluster.client import MODEL, Client, Follower
from tests.cluster.fleet import Fleet, fleet_config, running

PROMPT = make_prompt(40)


@dataclass(frozen=True)
class Made:
    """Adapters of one model, and the model that each makes of it."""

    base: Path
    folders: dict[str, Path]
    references: dict[str, Reference]

    def greedy(self, name: str, num_tokens: int) -> list[int]:
        return self.references[name].greedy(PROMPT, num_tokens)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("adapters")
    base = make_tiny(folder / "model")
    folders = {
        name: make_adapter(folder / name, base, rank=rank, seed=rank, strength=2.0)
        for name, rank in (("sql", 3), ("poems", 5), ("newer", 4))
    }
    paths = {name: merged(folder / f"{name}-merged", base, path) for name, path in folders.items()}
    references = {name: Reference(path) for name, path in {MODEL: base, **paths}.items()}
    return Made(base, folders, references)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(made: Made, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    store = tmp_path_factory.mktemp("store") / "responses"
    config = fleet_config(made.base, prefill=1, decode=2, answers=AnswerConfig(store=str(store)))
    async with running(Fleet(config)) as fleet:
        yield fleet


@pytest_asyncio.fixture(loop_scope="session")
async def sdk(fleet: Fleet) -> AsyncIterator[openai.AsyncOpenAI]:
    base = f"{fleet.url}/v1"
    async with openai.AsyncOpenAI(base_url=base, api_key="none", max_retries=0) as sdk:
        yield sdk


async def order(sdk: openai.AsyncOpenAI, what: str, **body: Any) -> str:
    return await sdk.post(f"/{what}_lora_adapter", cast_to=str, body=body)


async def test_adapters_live_through_kills_joins_other_bytes_and_a_restart(
    made: Made, fleet: Fleet, sdk: openai.AsyncOpenAI
) -> None:
    expected = {name: made.greedy(name, 12) for name in made.references}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    for name in ("sql", "poems"):
        path = str(made.folders[name])
        said = await order(sdk, "load", lora_name=name, lora_path=path)
        assert said == f"Success: LoRA adapter '{name}' added successfully."
    with pytest.raises(openai.BadRequestError, match="has already been loaded"):
        await order(sdk, "load", lora_name="sql", lora_path=str(made.folders["sql"]))
    with pytest.raises(openai.NotFoundError, match="no folder"):
        await order(sdk, "load", lora_name="other", lora_path="/nowhere")
    listed = {model.id: model.model_dump() for model in (await sdk.models.list()).data}
    assert list(listed) == [MODEL, "sql", "poems"]
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == (MODEL, str(made.folders["sql"]))

    async with Client(fleet.url) as client:

        async def check(*names: str) -> None:
            for name in names:
                output = await client.complete(PROMPT, 12, model=name)
                assert output.tokens == expected[name], name

        await check(MODEL, "sql", "poems", "sql", MODEL)
        streams = [Follower(client, PROMPT, 150, model=name) for name in ("sql", "poems", MODEL)]
        for stream in streams:
            await stream.reached(20)
        await fleet.kill_node("decode-0")
        said = await order(
            sdk, "load", lora_name="sql", lora_path=str(made.folders["newer"]), load_inplace=True
        )
        for name, stream in zip(("sql", "poems", MODEL), streams, strict=True):
            assert (await stream.end()).tokens == made.greedy(name, 150), name
        await fleet.start_node("decode-0")
        await fleet.kill_node("decode-1")  # the newcomer alone is left
        expected["sql"] = expected["newer"]
        await check("sql", MODEL, "poems")

        await fleet.start_node("decode-1")
        await fleet.restart_coordinator()
        await check("poems", "sql", MODEL)
        running_on = Follower(client, PROMPT, 100, model="poems")
        await running_on.reached(5)
        assert "removed" in await order(sdk, "unload", lora_name="poems")
        refused = await client.complete(PROMPT, 12, model="poems")
        assert (refused.status, refused.error and refused.error["code"]) == (404, "model_not_found")
        assert (await running_on.end()).tokens == made.greedy("poems", 100)
        with pytest.raises(openai.NotFoundError, match="cannot be found"):
            await order(sdk, "unload", lora_name="poems")
        await check("sql", MODEL)
