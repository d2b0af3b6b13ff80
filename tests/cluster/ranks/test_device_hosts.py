"""Nodes whose ranks have KV of their own, on two hosts, as on GPUs: the tokens of one rank."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import pytest_asyncio

from pdserve.protocol import NodeRole
from pdserve.settings.config import NodeConfig
from tests.cluster.checkpoints import Reference
from tests.cluster.fleet import Fleet, running
from tests.cluster.forked import ForkedChild
from tests.cluster.ranks.ranked_nodes import (
    COMPARED,
    RankHost,
    check_every_pair,
    check_host_waits,
    check_lost_host,
    check_prefix_is_pulled,
    check_streams_move,
    config_of_pairs,
)

LENGTHS = (1, 17, 336)
NUM_STREAMED = 120  # of the streams that move
# By default the same nodes are compared in one process, and ranks of one pool as a cluster.
pytestmark = pytest.mark.long


def fork_ranks() -> None:
    """Ranks are forked: starting Python takes seconds."""
    from tests.unit.node.device_ranked import fork_device_ranks

    fork_device_ranks()


def as_on_gpus() -> None:
    """Models are planned as for GPUs, where the ranks of a stage may be on several hosts."""
    from pdserve.node.start import draft, known_plans, model

    def planned(config: NodeConfig, role: NodeRole) -> model.NodeModel:
        return replace(draft.plan_models(config, role), kernels=None)

    fork_ranks()
    patch.object(model, "check_host_stages").start()
    patch.object(known_plans, "plan_models", planned).start()


class GpuChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None]:
        return as_on_gpus


class RanksForked(ForkedChild):
    """A host, which forks its ranks."""

    def _prepare(self, words: list[str]) -> Callable[[], None]:
        return fork_ranks


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hosts(checkpoint: Path) -> AsyncIterator[list[RankHost]]:
    """The second hosts of prefill-0 and decode-0."""
    hosts = [RankHost(checkpoint, RanksForked, "--device=cpu") for _ in range(2)]
    yield hosts
    for host in hosts:
        await host.end()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(checkpoint: Path, hosts: list[RankHost]) -> AsyncIterator[Fleet]:
    """One layer on 2 hosts, and 1 rank -> 2 x 2 ranks on 2 hosts, and -> 1 rank by TCP."""
    flags = {
        "prefill-0": [
            "--tensor-parallel=2",
            "--set=engine.pipeline_parallel=1",
            f"--rank-hosts={hosts[0].address}",
        ],
        "decode-0": ["--tensor-parallel=2", f"--rank-hosts={hosts[1].address}"],
        "decode-1": ["--transports=tcp"],
    }
    config = config_of_pairs(checkpoint)
    async with running(Fleet(config, flags, GpuChild)) as fleet:
        yield fleet


async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    await check_every_pair(ranked, reference, LENGTHS, COMPARED[:6])


async def test_a_prefix_is_pulled_by_a_node_of_other_hosts(
    ranked: Fleet, reference: Reference
) -> None:
    await check_prefix_is_pulled(ranked, reference)


async def test_streams_move_from_a_node_that_drains(ranked: Fleet) -> None:
    """With their KV, from one rank to two hosts."""
    await check_streams_move(ranked, "decode-1", NUM_STREAMED)


async def test_a_lost_host_ends_its_node_and_its_streams_go_on(
    ranked: Fleet, hosts: list[RankHost]
) -> None:
    await check_lost_host(ranked, "decode-0", hosts[1], 2, NUM_STREAMED)


async def test_a_host_waits_for_its_node_to_come_back(
    ranked: Fleet, hosts: list[RankHost], reference: Reference
) -> None:
    await check_host_waits(ranked, "prefill-0", hosts[0], reference)
