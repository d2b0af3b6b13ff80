"""Nodes whose ranks have KV of their own, on two hosts, as on GPUs: the tokens of one rank."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from pdserve.commands.cluster.ports import ReservedPort
from pdserve.settings.config import NodeConfig
from tests.cluster.checkpoints import Reference, make_family
from tests.cluster.fleet import Fleet, running
from tests.cluster.forked import ForkedChild, ForkedProcess
from tests.cluster.ranks.ranked_nodes import (
    FAMILY,
    check_comes_back,
    check_every_pair,
    check_prefix_is_pulled,
    check_streams_move,
    children,
    config_of_pairs,
    undisturbed,
    until_gone,
)

LENGTHS = (1, 17, 336)
NUM_STREAMED = 120  # of the streams that move


def fork_ranks() -> None:
    """Ranks are forked: starting Python takes seconds."""
    from tests.unit.node.device_ranked import fork_device_ranks

    fork_device_ranks()


def as_on_gpus() -> None:
    """Models are planned as for GPUs, where the ranks of a stage may be on several hosts."""
    from pdserve.node import runtime
    from pdserve.node.start import model

    def planned(config: NodeConfig) -> model.NodeModel:
        return replace(model.plan_model(config), kernels=None)

    fork_ranks()
    model.check_host_stages = lambda share: None
    runtime.plan_model = planned


class GpuChild(ForkedChild):
    def _prepare(self, words: list[str]) -> Callable[[], None]:
        return as_on_gpus


class RankHost:
    """A `pdserve rank`, which a node's second host runs."""

    def __init__(self, model: Path) -> None:
        self._reserved = ReservedPort("127.0.0.1")
        port = self._reserved.port
        self.address = f"127.0.0.1:{port}"
        self._words = [f"--port={port}", f"--model={model}", "--device=cpu", "--threads=1"]
        self.start()

    def start(self) -> None:
        self.process = ForkedProcess(["rank", *self._words], os.environ, fork_ranks)
        self.process.begin()

    def close(self) -> None:
        """End it, for good."""
        self._reserved.close()
        written = self.end(signal.SIGTERM)
        assert "Traceback" not in written, written

    def end(self, number: signal.Signals) -> str:
        """End it; what it has written."""
        self.process.send_signal(number)
        assert self.process.wait() == -number
        with self.process.stdout, open(self.process.stdout.fileno(), closefd=False) as written:
            return written.read()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_family(tmp_path_factory.mktemp("ranked"), FAMILY)


@pytest.fixture(scope="module")
def hosts(checkpoint: Path) -> Iterator[list[RankHost]]:
    """The second hosts of prefill-0 and decode-0."""
    hosts = [RankHost(checkpoint) for _ in range(2)]
    yield hosts
    for host in hosts:
        host.close()


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


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def reference(ranked: Fleet) -> Reference:
    return Reference(Path(ranked.config.checkpoint.model))


async def test_every_pair_gives_the_tokens_of_transformers(
    ranked: Fleet, reference: Reference
) -> None:
    await check_every_pair(ranked, reference, LENGTHS, "abcdef")


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
    node, host = ranked.pid("decode-0"), hosts[1]
    ranks = children(host.process.pid)
    assert len(ranks) == 2
    async with undisturbed(ranked, NUM_STREAMED):
        host.end(signal.SIGKILL)
        await until_gone([node, *ranks])
    host.start()
    await ranked.restore()
    await ranked.wait_back()


async def test_a_host_waits_for_its_node_to_come_back(
    ranked: Fleet, hosts: list[RankHost], reference: Reference
) -> None:
    host = hosts[0].process.pid
    ranks = children(host)
    assert len(ranks) == 1
    await ranked.kill_node("prefill-0")
    await until_gone(ranks)
    await check_comes_back(ranked, "prefill-0", reference)
    assert hosts[0].process.pid == host
