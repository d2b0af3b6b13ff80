"""Whatever order requests are served in, and wherever, their tokens are the same."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
import pytest_asyncio

from pdserve.settings.config import DecodePolicyName, PrefillPolicyName, RoutingConfig
from pdserve.shared.slo import AUTO, SloClass, parse_slo_classes
from tests.cluster.checkpoints import Reference, make_prompt
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, running

LENGTHS = (1, 16, 33, 90, 200, 450)
NUM_OUTPUT = 12
CLASSES = ("interactive", "standard", "batch")

PREFILL = {f"prefill-{i}": name for i, name in enumerate(get_args(PrefillPolicyName))}
DECODE = {f"decode-{i}": name for i, name in enumerate(get_args(DecodePolicyName))}


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fleet(tiny_checkpoint: Path) -> AsyncIterator[Fleet]:
    """Each node follows another policy, and takes its turn."""
    config = fleet_config(
        tiny_checkpoint,
        prefill=len(PREFILL),
        decode=len(DECODE),
        engine={"token_budget": 64, "max_batch_size": 4, "kv_memory": "16MiB"},
        routing=RoutingConfig(router="round-robin", admission=False),
    )
    flags = {name: [f"--set=policy.prefill_policy={policy}"] for name, policy in PREFILL.items()}
    flags |= {name: [f"--set=policy.decode_policy={policy}"] for name, policy in DECODE.items()}
    async with running(Fleet(config, flags)) as fleet:
        yield fleet


@pytest.mark.long  # in one process it does by default
async def test_every_policy_serves_everybody_exactly(fleet: Fleet, tiny_checkpoint: Path) -> None:
    """More requests than places, of all classes."""
    reference = Reference(tiny_checkpoint)
    expected = {length: reference.greedy(make_prompt(length), NUM_OUTPUT) for length in LENGTHS}
    requests = [(n, name, salt) for n in LENGTHS for name in CLASSES for salt in "abcd"]
    async with Client(fleet.url) as client:
        outputs = await asyncio.gather(
            *(
                client.complete(make_prompt(n), NUM_OUTPUT, slo_class=name, cache_salt=salt + name)
                for n, name, salt in requests
            )
        )
    for (length, name, _), output in zip(requests, outputs, strict=True):
        at = f"{length} tokens, {name}, {output.prefill_node} and {output.decode_node}"
        assert output.tokens == expected[length], at
    assert {output.prefill_node for output in outputs} == set(PREFILL)
    assert {output.decode_node for output in outputs} == set(DECODE)


async def test_adaptive_mode_serves_exactly(tiny_checkpoint: Path) -> None:
    """With the router that predicts, and admission: the defaults."""
    reference = Reference(tiny_checkpoint)
    config = fleet_config(tiny_checkpoint, mode="adaptive", routing=RoutingConfig())
    async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
        outputs = await asyncio.gather(
            *(
                client.complete(make_prompt(n), NUM_OUTPUT, cache_salt=salt)
                for n in LENGTHS
                for salt in "ab"
            )
        )
        for output, length in zip(outputs, [n for n in LENGTHS for _ in "ab"], strict=True):
            assert output.tokens == reference.greedy(make_prompt(length), NUM_OUTPUT), length


@pytest.mark.long  # test_measured_promises.py has it by default
async def test_measured_promises_are_told_as_they_can_be_set(tiny_checkpoint: Path) -> None:
    routing = RoutingConfig(slo_classes=[AUTO])
    config = fleet_config(tiny_checkpoint, mode="colocated", routing=routing)
    async with running(Fleet(config)) as fleet:
        told = [line.partition("--slo-classes ")[2] for _, line in fleet.lines]
    (setting,) = shlex.split([text for text in told if text][-1])
    classes = parse_slo_classes(setting.split(","), "standard").by_name
    assert 0 < classes["interactive"].ttft_s < classes["standard"].ttft_s
    assert 0 < classes["interactive"].tpot_s < classes["standard"].tpot_s
    assert classes["batch"] == SloClass(name="batch")
