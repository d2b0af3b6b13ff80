"""Networks that are far too slow for KV, far away, or lossy: no request hangs, no token differs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pdserve import _native
from pdserve.settings.config import HandoffConfig
from tests.cluster.client import Client
from tests.cluster.fleet import Fleet, fleet_config, running
from tests.cluster.prompts import make_prompt

FAR = "* * bandwidth=1.25e7 delay=0.05 loss=0.01"
HOPELESS = "* * bandwidth=500"  # a prompt takes many times as long as a pull may


@pytest.mark.long
@pytest.mark.timeout(600)  # three clusters
async def test_no_network_changes_a_token(tiny_checkpoint: Path) -> None:
    answers = []
    for links in ([], [FAR], [HOPELESS]):
        config = fleet_config(
            tiny_checkpoint,
            transports=["tcp"],
            handoff=HandoffConfig(links=links),
            engine={"kernels": _native.kernel_variants()[0]},
            timeouts={"transfer_s": 5.0},
        )
        async with running(Fleet(config)) as fleet, Client(fleet.url) as client:
            prompts = [make_prompt(200, seed) for seed in range(4)]
            outputs = await asyncio.gather(*(client.complete(p, 8) for p in prompts))
            node = (await fleet.status()).node("prefill-0")
            assert node is not None
            assert bool(node.failing) == (links == [HOPELESS]), "so decode nodes compute"
        answers.append([output.tokens for output in outputs])
    assert answers[0] == answers[1] == answers[2]
