"""Nodes of several ranks, stages and hosts: the tokens of one, whoever has whose KV, however."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.commands.cluster.child import Child
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.commands.cluster.supervisor import OWN_COMMAND
from tests.cluster.checkpoints import Reference, make_family
from tests.cluster.fleet import Fleet, running
from tests.cluster.forked import ForkedChild
from tests.cluster.ranks.ranked_nodes import (
    FAMILY,
    check_comes_back,
    check_every_pair,
    check_prefix_is_pulled,
    children,
    config_of_pairs,
    undisturbed,
    until_gone,
)
from tests.forked_rank import fork_ranks

LENGTHS = (1, 16, 17, 100, 336)
NUM_STREAMED = 400  # tokens of the streams that go on elsewhere


class RanksForked(ForkedChild):
    """A process that forks its ranks, too, if it is of a decode node. Others start Python anew."""

    def _prepare(self, words: list[str]) -> Callable[[], None] | None:
        return None if words[0] == "prefill" else fork_ranks


class RankHost:
    """A `pdserve rank`, which a node's second host runs."""

    def __init__(self, model: Path, make_child: type[Child]) -> None:
        self._model = model
        self._make_child = make_child
        self._reserved = ReservedPort("127.0.0.1")
        self.address = f"127.0.0.1:{self._reserved.port}"
        self.lines: list[str] = []
        self.start()

    def start(self) -> None:
        port = str(self._reserved.port)
        words = [*OWN_COMMAND, "rank", "--port", port, "--model", str(self._model), "--threads=1"]
        self.process = self._make_child("host", words, self._remember, lambda _: None)

    async def end(self) -> None:
        self._reserved.close()
        assert (await self.process.stop(10.0)).returncode == -signal.SIGTERM
        assert not any("Traceback" in line for line in self.lines), self.lines

    def _remember(self, _: str, line: str) -> None:
        self.lines.append(line)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def hosts(checkpoint: Path) -> AsyncIterator[list[RankHost]]:
    """The second hosts of prefill-1 and decode-1."""
    hosts = [RankHost(checkpoint, Child), RankHost(checkpoint, RanksForked)]
    yield hosts
    for host in hosts:
        await host.end()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("ranked"), FAMILY)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ranked(checkpoint: Path, hosts: list[RankHost]) -> AsyncIterator[Fleet]:
    """2 ranks and 2 hosts -> 2 x 2 ranks by shared memory, and -> 2 hosts by TCP."""
    flags = {
        "prefill-0": ["--tensor-parallel=2"],
        "prefill-1": [f"--rank-hosts={hosts[0].address}"],
        "decode-0": ["--tensor-parallel=2", "--set=engine.pipeline_parallel=2"],
        "decode-1": ["--transports=tcp", f"--rank-hosts={hosts[1].address}"],
    }
    config = config_of_pairs(checkpoint)
    async with running(Fleet(config, flags, RanksForked)) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reference(ranked: Fleet) -> Reference:
    return Reference(Path(ranked.config.checkpoint.model))


async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    await check_every_pair(ranked, reference, LENGTHS, "abcdefgh")


async def test_a_prefix_is_pulled_by_a_node_of_other_ranks(
    ranked: Fleet, reference: Reference
) -> None:
    await check_prefix_is_pulled(ranked, reference)


async def test_a_killed_rank_ends_its_node_and_its_streams_go_on(ranked: Fleet) -> None:
    node = ranked.pid("decode-0")
    ranks = children(node)
    assert len(ranks) == 3
    async with undisturbed(ranked, NUM_STREAMED):
        os.kill(ranks[1], signal.SIGKILL)
        await until_gone([node, *ranks])
    await ranked.restore()
    await ranked.wait_back()


async def test_a_lost_host_ends_its_node_and_its_streams_go_on(
    ranked: Fleet, hosts: list[RankHost]
) -> None:
    node, host = ranked.pid("decode-1"), hosts[1].process
    ranks = children(host.pid)
    assert len(ranks) == 1
    async with undisturbed(ranked, NUM_STREAMED):
        host.send_signal(signal.SIGKILL)
        await until_gone([node, *ranks])
    await host.ended()
    hosts[1].start()
    await ranked.restore()
    await ranked.wait_back()


async def test_a_host_waits_for_its_node_to_come_back(
    ranked: Fleet, hosts: list[RankHost], reference: Reference
) -> None:
    host = hosts[0].process
    ranks = children(host.pid)
    await ranked.kill_node("prefill-1")
    await until_gone(ranks)
    await check_comes_back(ranked, "prefill-1", reference)
    assert host.is_running


async def test_ranks_end_with_their_node(ranked: Fleet) -> None:
    node = ranked.pid("prefill-0")
    ranks = children(node)
    assert len(ranks) == 1
    os.kill(node, signal.SIGKILL)
    await until_gone(ranks)
