"""Nodes whose ranks have KV of their own, as on GPUs, here by gloo: the tokens of one rank."""

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
    check_every_pair,
    check_killed_rank,
    check_prefix_is_pulled,
    check_ranks_end,
    check_streams_move,
    config_of_pairs,
)

pytestmark = pytest.mark.long  # nodes in one process do the same by default

LENGTHS = (1, 17, 100, 336)
NUM_STREAMED = 120  # of the streams that move


def as_on_gpus() -> None:
    """Models are planned as for GPUs, and ranks are forked: starting Python takes seconds.

    Those of decode-0 are started as ever.
    """
    from pdserve.node.device_ranks import start
    from pdserve.node.start import known_plans
    from pdserve.node.start.draft import plan_models
    from pdserve.node.start.model import NodeModel
    from tests.forked_rank import begin_forking
    from tests.unit.node.device_ranked import forked_rank

    begin_forking()
    python = start._python

    def planned(config: NodeConfig, role: NodeRole) -> NodeModel:
        if config.node_id != "decode-0":
            start._python = forked_rank
        return replace(plan_models(config, role), kernels=None)

    assert python is start._python
    patch.object(known_plans, "plan_models", planned).start()


class GpuChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None]:
        return as_on_gpus


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(checkpoint: Path) -> AsyncIterator[Fleet]:
    """2 ranks, and 2 stages of 2 -> 2 stages by shared memory, and -> 1 rank by TCP."""
    flags = {
        "prefill-0": ["--tensor-parallel=2"],
        "prefill-1": ["--tensor-parallel=2", "--set=engine.pipeline_parallel=2"],
        "decode-0": ["--set=engine.pipeline_parallel=2"],
        "decode-1": ["--transports=tcp"],
    }
    async with running(Fleet(config_of_pairs(checkpoint), flags, GpuChild)) as fleet:
        yield fleet


async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    await check_every_pair(ranked, reference, LENGTHS, COMPARED[:6])


async def test_a_prefix_is_pulled_by_a_node_of_other_ranks(
    ranked: Fleet, reference: Reference
) -> None:
    await check_prefix_is_pulled(ranked, reference)


async def test_streams_move_from_a_node_that_drains(ranked: Fleet) -> None:
    """With their KV, from one rank to two."""
    await check_streams_move(ranked, "decode-1", NUM_STREAMED)


async def test_a_killed_rank_ends_its_node_and_its_streams_go_on(ranked: Fleet) -> None:
    await check_killed_rank(ranked, "decode-0", 1, NUM_STREAMED)


async def test_ranks_end_with_their_node(ranked: Fleet) -> None:
    await check_ranks_end(ranked, "prefill-0")
