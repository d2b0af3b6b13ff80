"""Adapters come and go all the time, under load: no wrong token, no failed call."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

import openai
import pytest
from msgspec.structs import replace

from tests.adapters import make_adapter, merged
from tests.cluster.checkpoints import Reference, make_prompt, make_tiny
from tests.cluster.client import MODEL, Client
from tests.cluster.fleet import ROUTING, Fleet, fleet_config, poll, running

CHURN_S = 300.0
EVERY_S = 2.0  # a name is loaded or unloaded
NUM_FILES, NUM_NAMES, NUM_CALLERS, NUM_TOKENS = 20, 5, 16, 40
NUM_KNOWN = 1000  # names
MOST = NUM_CALLERS + 1  # adapters that a node has at a time: fewer than calls name
COLD_S = 60  # that a call waits for an adapter which no node has: a busy machine reads it late
PROMPTS = [make_prompt(length) for length in (5, 40, 41)]


@dataclass
class Churn:
    """What names stand for, as callers may rely on it."""

    served: dict[str, int]  # name |-> number of its file; -1: the model itself
    random: Random = field(default_factory=lambda: Random(1))
    unheard: Counter[str] = field(default_factory=Counter)  # name |-> calls nobody has answered yet
    num_changes: int = 0
    num_calls: int = 0
    wrong: list[str] = field(default_factory=list)
    ends_s: float = field(default_factory=lambda: time.monotonic() + CHURN_S)

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.ends_s

    async def is_heard(self, name: str) -> bool:
        """Whether the coordinator has begun all calls of a name: unloaded before, it is refused."""
        return not self.unheard[name]


async def change(churn: Churn, sdk: openai.AsyncOpenAI, folders: list[Path]) -> None:
    """Unload a name, or load other files under it."""
    while not churn.is_over:
        await asyncio.sleep(EVERY_S)
        name = f"a{churn.random.randrange(NUM_NAMES)}"
        body = {"lora_name": name}
        if churn.served.pop(name, None) is not None:  # no call begins with it; those that run go on
            await poll(partial(churn.is_heard, name), 2 * COLD_S, lambda: f"{churn.unheard}")
            await sdk.post("/unload_lora_adapter", cast_to=str, body=body)
        else:
            number = churn.random.randrange(NUM_FILES)
            body["lora_path"] = str(folders[number])
            await sdk.post("/load_lora_adapter", cast_to=str, body=body)
            churn.served[name] = number
        churn.num_changes += 1


async def call(churn: Churn, client: Client, expected: dict[tuple[int, int], list[int]]) -> None:
    """One call after the other, each with a name that is served when it begins."""
    while not churn.is_over:
        name = churn.random.choice(list(churn.served))
        number, prompt = churn.served[name], churn.random.randrange(len(PROMPTS))
        churn.unheard[name] += 1
        async with client.stream(PROMPTS[prompt], NUM_TOKENS, model=name) as stream:
            churn.unheard[name] -= 1
            output = await stream.rest()
        churn.num_calls += 1
        if output.error is not None or output.token_ids != expected[number, prompt]:
            churn.wrong.append(f"{name}, file {number}: {output}")


async def load_known(sdk: openai.AsyncOpenAI, folders: list[Path]) -> None:
    """Load one name for each of these."""

    async def load(number: int) -> None:
        body = {"lora_name": f"k{number}", "lora_path": str(folders[number])}
        await sdk.post("/load_lora_adapter", cast_to=str, body=body)

    for first in range(0, len(folders), NUM_CALLERS):
        numbers = range(first, min(first + NUM_CALLERS, len(folders)))
        await asyncio.gather(*map(load, numbers))


@pytest.mark.long
@pytest.mark.timeout(1500)
async def test_names_come_and_go_among_a_thousand_under_load(tmp_path: Path) -> None:
    base = make_tiny(tmp_path / "model")
    folders = [
        make_adapter(tmp_path / f"f{n}", base, rank=2 + n, seed=n, strength=2.0)
        for n in range(NUM_FILES)
    ]
    models = {-1: base} | {n: merged(tmp_path / f"m{n}", base, f) for n, f in enumerate(folders)}
    expected = {
        (number, index): Reference(path).greedy(prompt, NUM_TOKENS)
        for number, path in models.items()
        for index, prompt in enumerate(PROMPTS)
    }
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
    routing = replace(ROUTING, slo_classes=[f"standard wait={COLD_S}"])
    config = fleet_config(base, prefill=1, decode=2, routing=routing)
    config = replace(config, engine=replace(config.engine, max_adapters=MOST))
    others = [
        make_adapter(tmp_path / f"k{n}", base, modules=("q_proj",), rank=1, seed=n)
        for n in range(NUM_FILES, NUM_KNOWN - NUM_NAMES)
    ]
    async with running(Fleet(config)) as fleet, Client(fleet.url, 2 * COLD_S) as client:
        url = f"{fleet.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as sdk:
            await load_known(sdk, folders + others)
            served = {f"k{number}": number for number in range(NUM_FILES)}
            churn = Churn({MODEL: -1} | served)
            callers = [call(churn, client, expected) for _ in range(NUM_CALLERS)]
            await asyncio.gather(change(churn, sdk, folders), *callers)
    assert not churn.wrong, "\n".join([f"{len(churn.wrong)} of {churn.num_calls}", *churn.wrong])
    assert churn.num_calls > 10 * NUM_CALLERS
    assert churn.num_changes > CHURN_S / EVERY_S / 4
