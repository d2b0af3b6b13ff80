"""With drafts and without, clusters give random requests the same answers, in every mode.

What differs is in usage: how many tokens were guessed. All is asked twice, by two tenants, so that
former answers are guessed, too. PDSERVE_REQUESTS=250 asks 500 requests of each case.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace

from pdserve.demo_model import CHECKPOINT_PATH, DRAFT_PATH
from pdserve.settings.access import AccessConfig, hash_key
from pdserve.settings.config import CheckpointConfig, Mode
from pdserve.settings.speculation import SpeculationConfig
from tests.adapters import make_adapter
from tests.cluster.client import MODEL, EventStream
from tests.cluster.fleet import (
    HEARD_S,
    Fleet,
    SecondCoordinator,
    fleet_config,
    poll,
    running,
)

TENANTS = ("ann", "bob")
COUNT = int(os.environ.get("PDSERVE_REQUESTS", "60"))  # each asked twice
DEADLINE_S = 6.0 * COUNT  # for a cluster to answer them, on a machine that does much else
START_S = 300.0  # likewise, to be ready
TEXT = "The old tower stands by the sea. The small boat sails to the old tower by the sea. "
SCHEMA = {
    "type": "object",
    "properties": {
        "colour of the boat": {"enum": ["light green", "dark blue"]},
        "name": {"type": "string", "maxLength": 20},
        "sizes": {"type": "array", "items": {"type": "integer"}, "maxItems": 4},
    },
    "required": ["colour of the boat", "name", "sizes"],
    "additionalProperties": False,
}
# One of each: over many requests, each comes with each other.
OPTIONS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.0, "top_p": 0.9}),
    ({}, {"repetition_penalty": 1.2}, {"frequency_penalty": 0.5, "presence_penalty": 0.3}),
    ({}, {"logit_bias": {"262": 2.0, "300": -5.0}}, {"bad_words": [" the old"]}),
    ({}, {"stop": ["boat", "\n"]}, {"stop_token_ids": [305]}, {"min_tokens": 9}),
    ({}, {"n": 2}),
    ({"stream": True}, {"stream": False}),
)
CHATS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({}, {"prediction": {"type": "content", "content": TEXT * 2}}),
    ({}, {}, {"response_format": {"type": "json_object"}}, {"response_format": "schema"}),
    ({}, {"logprobs": True, "top_logprobs": 2}),
)
COMPLETIONS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({}, {"logprobs": 2}),
    ({}, {"echo": True}, {"best_of": 3}),
)


@dataclass
class Said:
    """An answer, but for ids, times and counts of guesses."""

    choices: dict[int, list[Any]] = field(default_factory=dict)
    num_tokens: int = 0
    num_accepted: int = 0


@dataclass(frozen=True)
class Case:
    """A cluster, and what happens to it."""

    mode: Mode = "disaggregated"
    engine: dict[str, Any] = field(default_factory=dict)
    kills: str = ""
    drains: str = ""
    adapter: str = ""  # that every other request is to
    other_model: str = ""  # the same: of nodes of its own

    def __str__(self) -> str:
        engine = [f"{name}={value}" for name, value in self.engine.items()]
        faults = [f"{what} {node}" for what, node in self._faults if node]
        return " ".join([self.mode, *engine, *faults])

    @property
    def _faults(self) -> list[tuple[str, str]]:
        named = [("adapter", self.adapter), ("beside", self.other_model)]
        return [("kills", self.kills), ("drains", self.drains), *named]

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(filter(None, (MODEL, self.adapter, self.other_model)))


def call(number: int, models: Sequence[str] = (MODEL,)) -> tuple[str, dict[str, Any]]:
    """Path and body of a request to one of these, the same for the same number."""
    chosen = random.Random(number)
    is_chat = chosen.random() < 0.6
    model = models[number % len(models)]
    body: dict[str, Any] = {"model": model, "seed": number, "max_tokens": chosen.choice([1, 9, 60])}
    for one_of in (*OPTIONS, *(CHATS if is_chat else COMPLETIONS)):
        body |= chosen.choice(one_of)
    if body.get("response_format") == "schema":
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        body["response_format"] = schema
    if "response_format" in body or body["max_tokens"] == 1:
        body.pop("min_tokens", None)
    if body.get("best_of"):
        body["stream"] = False
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    text = TEXT * chosen.randrange(1, 4)
    if is_chat:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text}


def add(said: Said, answer: dict[str, Any]) -> None:
    """Take in a chunk, or a whole answer."""
    for choice in answer["choices"]:
        parts = said.choices.setdefault(choice["index"], ["", "", [], None])
        shown = choice.get("delta") or choice.get("message") or choice
        parts[0] += shown.get("content") or shown.get("text") or ""
        parts[1] += shown.get("reasoning_content") or ""
        scores = choice.get("logprobs") or {}
        parts[2] += scores.get("content") or scores.get("token_logprobs") or []
        parts[3] = choice.get("finish_reason") or parts[3]
    if answer.get("usage"):
        said.num_tokens = answer["usage"]["completion_tokens"]
        details = answer["usage"].get("completion_tokens_details") or {}
        said.num_accepted = details.get("accepted_prediction_tokens", 0)


async def ask(session: aiohttp.ClientSession, url: str, number: int, models: Sequence[str]) -> Said:
    path, body = call(number, models)
    headers = {"Authorization": f"Bearer {TENANTS[number % len(TENANTS)]}"}
    said = Said()
    async with session.post(url + path, json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        if not body["stream"]:
            add(said, await response.json())
            return said
        async for line in response.content:
            if line.startswith(b"data: {"):
                add(said, json.loads(line.removeprefix(b"data: ")))
    return said


async def answers(fleet: Fleet, case: Case) -> list[Said]:
    """All answers, of both rounds; amid the first, a node is killed or drained."""
    places = asyncio.Semaphore(6)
    num_begun = 0

    async def one(session: aiohttp.ClientSession, number: int) -> Said:
        nonlocal num_begun
        async with places:
            num_begun += 1
            if num_begun == COUNT // 2 and case.kills:
                await fleet.kill_node(case.kills)
            if num_begun == COUNT // 2 and case.drains:
                await fleet.drain_node(case.drains)
            return await ask(session, fleet.url, number, case.models)

    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession() as session:
        return [
            said
            for _ in range(2)
            for said in await asyncio.gather(*(one(session, number) for number in range(COUNT)))
        ]


CASES = (
    Case("colocated", {"quantization": "int8"}),
    Case(engine={"kv_dtype": "fp8"}, drains="decode-1"),
    Case(adapter="poems", kills="decode-1"),
    Case(other_model="smaller"),
    Case(engine={"kv_dtype": "int8", "pipeline_parallel": 2, "threads": 2}),
    Case(engine={"quantization": "int8", "tensor_parallel": 2}),
    Case("adaptive"),
    Case("flowing"),
    Case("multiplexed", {"threads": 0}),
)


@pytest.mark.long
@pytest.mark.timeout(2 * (START_S + DEADLINE_S))
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_answers_are_the_same(case: Case, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'[tenants.{n}]\nkeys = ["{hash_key(n)}"]\n' for n in TENANTS))
    found = []
    for speculation in ("off", "auto"):
        config = fleet_config(
            CHECKPOINT_PATH,
            mode=case.mode,
            engine=case.engine,
            access=AccessConfig(key_file=str(keys), readers="anybody"),
            speculation=SpeculationConfig(mode=speculation),
            **({"decode": 2} if case.kills or case.drains else {}),
        )
        if case.adapter:
            folder = tmp_path / f"{speculation}-{case.adapter}"
            make_adapter(folder, CHECKPOINT_PATH, strength=2.0)
            served = replace(config.checkpoint, adapters=[f"{case.adapter}={folder}"])
            config = replace(config, checkpoint=served)
        if case.other_model:
            models = {MODEL: CHECKPOINT_PATH, case.other_model: DRAFT_PATH}
            file = tmp_path / "models.toml"
            file.write_text("".join(f"[models.{n}]\nsource = '{p}'\n" for n, p in models.items()))
            config = replace(config, checkpoint=CheckpointConfig(), models=str(file))
        async with running(Fleet(replace(config, start_s=START_S))) as fleet:
            found.append(await answers(fleet, case))
    off, on = found
    for number, (plain, guessed) in enumerate(zip(off, on, strict=True)):
        about = call(number % COUNT, case.models)
        assert guessed.choices == plain.choices, about
        assert guessed.num_tokens == plain.num_tokens, about
        assert guessed.num_accepted <= guessed.num_tokens
    assert not any(said.num_accepted for said in off)
    assert sum(said.num_accepted for said in on) > 0


async def test_guessed_streams_go_on_at_another_coordinator() -> None:
    """Theirs is killed in mid-stream, with drafts in flight, and their clients come back."""
    second = SecondCoordinator(CHECKPOINT_PATH)
    nodes = ("prefill-0", "decode-0")
    both = {name: [f"--coordinators={second.grpc_address}"] for name in nodes}
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0, "logprobs": 1},
        {"temperature": 0.6, "seed": 5},
        {"temperature": 0.3, "seed": 6, "presence_penalty": 0.2},
    ]
    asked = [
        {"key": str(n), "prompt": TEXT * 3, "max_tokens": 300} | options
        for n, options in enumerate(samplings)
    ]
    async with running(Fleet(fleet_config(CHECKPOINT_PATH), both)) as fleet:
        async with second:
            await second.wait_ready(nodes)
            streams = [EventStream(second.url, **one) for one in asked]
            kill = second.child.send_signal
            first, *others = streams
            await asyncio.gather(
                first.read(9, lambda: kill(signal.SIGKILL)), *(other.read(0) for other in others)
            )
        second.release_ports()
        assert not any(stream.is_done for stream in streams)
        again = [
            EventStream(fleet.url, last_id=stream.last_id, **one)
            for stream, one in zip(streams, asked, strict=True)
        ]
        whole = [EventStream(fleet.url, **one | {"key": f"{one['key']} anew"}) for one in asked]
        await asyncio.gather(*(stream.read(0) for stream in (*again, *whole)))
        for begun, rest, expected in zip(streams, again, whole, strict=True):
            assert rest.is_done
            assert begun.token_ids + rest.token_ids == expected.token_ids
            assert len(expected.token_ids) == 300

        async def accepted() -> bool:  # nodes report from time to time
            drafts = [one for node in (await fleet.status()).nodes for one in node.drafts]
            return sum(one.accepted for one in drafts) > 0

        await poll(accepted, HEARD_S, lambda: "no guess was right")
