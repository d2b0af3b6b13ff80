"""Streams that a draft model guesses for say what they say without, in every mode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from pdserve.settings.config import ProfileConfig
from pdserve.settings.speculation import SpeculationConfig
from tests.checkpoints import make_checkpoint
from tests.cluster.checkpoints import VOCAB_SIZE, make_prompt, make_with_draft
from tests.cluster.client import Client, Follower, Output
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.cluster.ranks.ranked_nodes import RankHost
from tests.heads import add_mtp, make_eagle3

NUM_OUTPUT = 120
START_S = 300.0  # for a cluster to be ready, on a machine that does much else
WITHIN_S = 3 * START_S  # for a test of two
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 1.0, "seed": 7, "top_p": 0.9, "logprobs": 2},
    {"presence_penalty": 0.5, "frequency_penalty": 0.3, "temperature": 0.7, "seed": 3},
    {"guided_regex": "([a-m]{10}-){100}", "ignore_eos": False},
)
REQUESTS = [(make_prompt(length), kind) for length in (3, 70) for kind in KINDS]
MODES: list[dict[str, Any]] = [
    {},
    {"mode": "colocated", "decode": 2},
    {"mode": "flowing"},
    {"mode": "multiplexed", "engine": {"threads": 0}},
    {"mode": "colocated", "engine": {"tensor_parallel": 2}},
    {"engine": {"pipeline_parallel": 2, "threads": 2}},
]


async def said(client: Client) -> list[Output]:
    """One after the other: alone, a stream gains most."""
    return [await client.stream_all(prompt, NUM_OUTPUT, **kind) for prompt, kind in REQUESTS]


async def num_drafts(fleet: Fleet, kind: str) -> float:
    """Drafts of the model, on all nodes."""
    total = 0.0
    async with aiohttp.ClientSession() as session:
        for address in (await fleet.metrics_addresses()).values():
            async with session.get(f"http://{address}/metrics") as response:
                text = await response.text()
            name = f'pdserve_{kind}_total{{source="model"}} '
            lines = [line for line in text.splitlines() if line.startswith(name)]
            total += sum(float(line.removeprefix(name)) for line in lines)
    return total


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    model, draft = make_with_draft(folder)
    layer = {
        "hidden_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCAB_SIZE,
    }
    taps = [0, 3, 5]
    head = make_eagle3(folder / "head", layer=layer, eagle_aux_hidden_state_layer_ids=taps)
    further = [
        add_mtp(make_checkpoint(folder / name, "deepseek_v3", vocab_size=VOCAB_SIZE), num_layers=n)
        for n, name in enumerate(("mtp", "mtp-2"), 1)
    ]
    return {"model": model, "draft": draft, "head": head, "mtp": further[0], "mtp-2": further[1]}


@pytest.mark.long
@pytest.mark.timeout(WITHIN_S)
@pytest.mark.parametrize(
    ("guesser", "mode"),
    [
        *(("draft", mode) for mode in MODES),
        ("head", {}),
        ("head", MODES[3]),
        ("head", MODES[4]),
        ("head", MODES[5]),
        *(("mtp", mode) for mode in [{}, *MODES[4:]]),
        ("mtp-2", {}),
    ],
)
async def test_a_draft_model_changes_nothing(
    models: dict[str, Path], guesser: str, mode: dict[str, Any]
) -> None:
    is_mtp = guesser.startswith("mtp")
    model, draft = models[guesser if is_mtp else "model"], "mtp" if is_mtp else models[guesser]
    speculation = SpeculationConfig(model=str(draft), sources=["model"])
    config = fleet_config(model, **mode | {"speculation": speculation})
    # By a guess, the small one is predicted to be worth it.
    config = msgspec.structs.replace(config, profile=ProfileConfig(profile="off"), start_s=START_S)
    off = msgspec.structs.replace(config, speculation=SpeculationConfig(mode="off"))
    async with running(Fleet(off)) as plain, Client(plain.url) as client:
        expected = await said(client)
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        found = await said(client)
        drafted = await num_drafts(fleet, "draft_tokens")  # of a node that drains, nobody counts
        accepted = await num_drafts(fleet, "accepted_draft_tokens")
        followers = [Follower(client, prompt, NUM_OUTPUT, **kind) for prompt, kind in REQUESTS]
        if config.decode > 1:
            await asyncio.gather(*(follower.reached(3) for follower in followers))
            await fleet.drain_node("decode-0")
        together = [await follower.end() for follower in followers]
    expect_same(expected, found, together)
    assert accepted > 0 if guesser == "draft" else drafted > 0  # a head has random weights


@pytest.mark.long
@pytest.mark.timeout(WITHIN_S)
async def test_a_head_has_the_rows_of_two_hosts(models: dict[str, Path]) -> None:
    config = msgspec.structs.replace(
        fleet_config(models["model"]), profile=ProfileConfig(profile="off"), start_s=START_S
    )
    found, host = [], RankHost(models["model"])
    try:
        for speculation in (
            SpeculationConfig(mode="off"),
            SpeculationConfig(model=str(models["head"]), sources=["model"]),
        ):
            flags = {"decode-0": [f"--rank-hosts={host.address}"]}
            fleet = Fleet(msgspec.structs.replace(config, speculation=speculation), flags)
            async with running(fleet), Client(fleet.url) as client:
                found.append(await said(client))
                drafted = await num_drafts(fleet, "draft_tokens")
    finally:
        await host.end()
    expect_same(*found)
    assert drafted > 0


def expect_same(expected: list[Output], *others: list[Output]) -> None:
    for outputs in others:
        assert [output.token_ids for output in outputs] == [o.token_ids for o in expected]
        assert [output.logprobs for output in outputs] == [o.logprobs for o in expected]
