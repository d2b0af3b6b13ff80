"""Nodes whose ranks have KV of their own, as on GPUs, here by gloo: the tokens of one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.settings.config import NodeConfig
from tests.cluster.checkpoints import Reference, make_family
from tests.cluster.fleet import Fleet, running
from tests.cluster.forked import ForkedChild
from tests.cluster.ranks.ranked_nodes import (
    FAMILY,
    check_every_pair,
    check_prefix_is_pulled,
    check_streams_move,
    children,
    config_of_pairs,
    undisturbed,
    until_gone,
)

LENGTHS = (1, 17, 100, 336)
NUM_STREAMED = 120  # of the streams that move


def as_on_gpus() -> None:
    """Models are planned as for GPUs, and ranks are forked: starting Python takes seconds.

    Those of decode-0 are started as ever.
    """
    from pdserve.node import runtime
    from pdserve.node.device_ranks import start
    from pdserve.node.start.model import NodeModel, plan_model
    from tests.forked_rank import begin_forking
    from tests.unit.node.device_ranked import forked_rank

    begin_forking()
    python = start._python

    def planned(config: NodeConfig) -> NodeModel:
        if config.node_id != "decode-0":
            start._python = forked_rank
        return replace(plan_model(config), kernels=None)

    assert python is start._python
    runtime.plan_model = planned


class GpuChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None]:
        return as_on_gpus


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """2 ranks, and 2 stages of 2 -> 2 stages by shared memory, and -> 1 rank by TCP."""
    flags = {
        "prefill-0": ["--tensor-parallel=2"],
        "prefill-1": ["--tensor-parallel=2", "--set=engine.pipeline_parallel=2"],
        "decode-0": ["--set=engine.pipeline_parallel=2"],
        "decode-1": ["--transports=tcp"],
    }
    config = config_of_pairs(make_family(tmp_path_factory.mktemp("ranked"), FAMILY))
    async with running(Fleet(config, flags, GpuChild)) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reference(ranked: Fleet) -> Reference:
    return Reference(Path(ranked.config.checkpoint.model))


async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    await check_every_pair(ranked, reference, LENGTHS, "abcdef")


@pytest.mark.long  # ranks on two hosts do it by default
async def test_a_prefix_is_pulled_by_a_node_of_other_ranks(
    ranked: Fleet, reference: Reference
) -> None:
    await check_prefix_is_pulled(ranked, reference)


@pytest.mark.long  # likewise
async def test_streams_move_from_a_node_that_drains(ranked: Fleet) -> None:
    """With their KV, from one rank to two."""
    await check_streams_move(ranked, "decode-1", NUM_STREAMED)


async def test_a_killed_rank_ends_its_node_and_its_streams_go_on(ranked: Fleet) -> None:
    node = ranked.pid("decode-0")
    ranks = children(node)
    assert len(ranks) == 1
    async with undisturbed(ranked, NUM_STREAMED):
        os.kill(ranks[0], signal.SIGKILL)
        await until_gone([node, *ranks])
    await ranked.wait_gone("decode-0")


async def test_ranks_end_with_their_node(ranked: Fleet) -> None:
    node = ranked.pid("prefill-0")
    ranks = children(node)
    assert len(ranks) == 1
    os.kill(node, signal.SIGKILL)
    await until_gone(ranks)
    await ranked.wait_gone("prefill-0")
