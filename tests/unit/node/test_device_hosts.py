"""Nodes whose ranks have devices on two hosts, here two processes: steps, deaths, KV, refusals."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest
import torch

from kv_transfer.hosts.agent import Agent
from kv_transfer.hosts.far_host import FarHost
from kv_transfer.tier import HostTier
from kv_transfer.transports.tls import NodeTls
from pdserve.commands.cluster.ports import ReservedPort
from pdserve.engine.request import Request, Scheduled
from pdserve.engine.steps.batch import WantedStates
from pdserve.node.device_hosts.later_hosts import LaterHosts
from pdserve.node.prefixes.host_tier import slot_copies, slots_of
from pdserve.node.rank_hosts.stream import HostStream
from pdserve.settings.access import SecurityConfig
from pdserve.shared.addresses import split_address
from pdserve.shared.errors import NodeSick, PeerLost
from pdserve.wire.security import Security
from tests.checkpoints import make_checkpoint
from tests.matrix import matrix
from tests.plain_batch import build_batch
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, make_prompt
from tests.unit.engine_model.harness import Node as Alone
from tests.unit.node.device_pairs import (
    NUM_OUTPUT,
    ends,
    prefilled_and_decoded,
    requests_of,
    tokens_of_one_rank,
)
from tests.unit.node.device_ranked import (
    DeviceRanked,
    ForkedHost,
    device_ranked,
    fork_device_ranks,
    host_config,
    model_of,
)

LENGTHS = (1, 16, 60)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("ranked") / "qwen3", "qwen3")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[list[int]]:
    return tokens_of_one_rank(checkpoint, LENGTHS)


@contextmanager
def later_host(
    checkpoint: Path, prepare: Callable[[], None] = fork_device_ranks, **settings: object
) -> Iterator[ForkedHost]:
    reserved = ReservedPort("127.0.0.1")
    host = ForkedHost(host_config(checkpoint, reserved.port, **settings), prepare)
    try:
        yield host
    finally:
        reserved.close()
        host.kill()


@pytest.fixture(scope="module")
def host(checkpoint: Path) -> Iterator[ForkedHost]:
    """Serves one node after the other."""
    with later_host(checkpoint) as host:
        yield host


@pytest.fixture(scope="module")
def other_host(checkpoint: Path) -> Iterator[ForkedHost]:
    with later_host(checkpoint) as host:
        yield host


@pytest.mark.parametrize(
    "divided", matrix([(one,) for one in [(2, 1), (1, 2), (4, 1)]], 1), ids=str
)  # ranks, and stages
def test_tokens_are_those_of_one_rank(
    checkpoint: Path, host: ForkedHost, expected: list[list[int]], divided: tuple[int, int]
) -> None:
    num_ranks, num_stages = divided
    requests = requests_of(LENGTHS)
    with device_ranked(
        checkpoint, num_ranks, num_stages=num_stages, hosts=[host.address]
    ) as ranked:
        ranked.node.generate(requests, NUM_OUTPUT, chunk=23)
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.long
def test_a_host_keeps_nothing_of_a_node_that_has_ended(checkpoint: Path, host: ForkedHost) -> None:
    def kv() -> set[str]:
        """Inodes of mapped pools. It may have some of this process, from which it was forked."""
        mapped = Path(f"/proc/{host.pid}/maps").read_text().splitlines()
        return {line.split()[4] for line in mapped if "pdserve-kv" in line}

    before = kv()
    with device_ranked(checkpoint, 2, hosts=[host.address]) as ranked:
        asyncio.run(computed_after_a_load(ranked, make_request(make_prompt(20))))
        of_node = kv() - before
        assert of_node
    end_s = time.monotonic() + 30.0
    while of_node & kv() and time.monotonic() < end_s:
        time.sleep(0.01)
    assert not of_node & kv()


def test_final_states_come_from_where_the_last_stage_is(checkpoint: Path, host: ForkedHost) -> None:
    prompt = make_prompt(19, seed=3)
    alone = Alone.load(checkpoint, DecoderKind.TORCH)
    want = states_of(alone, prompt)
    with device_ranked(checkpoint, 1, num_stages=2, hosts=[host.address]) as ranked:
        found = states_of(ranked.node, prompt)
    torch.testing.assert_close(found, want)


def states_of(node: Alone, prompt: list[int]) -> torch.Tensor:
    """[num_tokens, hidden_size] behind the last norm."""
    request = make_request(prompt)
    num_blocks = node.kv_cache.layout.blocks_for(len(prompt))
    request.block_table = [node.free.pop() for _ in range(num_blocks)]
    rows = [Scheduled(request, len(prompt))]
    batch = build_batch(rows, node.kv_cache.layout.block_size, torch.device("cpu"))
    out = torch.empty(len(prompt), node.model.config.hidden_size)
    wanted = WantedStates(torch.arange(len(prompt)), out)
    with torch.inference_mode():
        node.model.logits(replace(batch, states=wanted), node.kv_cache.pool)
    return out


def compute_for_ever(ranked: DeviceRanked) -> NoReturn:
    while True:
        request = make_request(make_prompt(9))
        ranked.node.generate([request], 2)
        ranked.node.free += request.block_table


@pytest.mark.parametrize("is_computing", matrix([True, False], 1), ids=["in steps", "idle"])
def test_a_killed_host_ends_the_node(checkpoint: Path, is_computing: bool) -> None:
    with (
        later_host(checkpoint) as host,
        device_ranked(checkpoint, 2, hosts=[host.address]) as ranked,
    ):
        assert ranked.ranks is not None
        ranked.node.logits(make_prompt(9))
        timer = threading.Timer(0.05, os.kill, (host.pid, 9))
        timer.start()
        started_s = time.monotonic()
        if is_computing:
            with pytest.raises(NodeSick, match="rank_lost"):
                compute_for_ever(ranked)
        while not ranked.ranks.lost and time.monotonic() < started_s + 30.0:
            timer.join(0.01)
        assert f"host {host.address}" in ranked.ranks.lost
        with pytest.raises(NodeSick, match="rank_lost"):
            ranked.node.logits(make_prompt(9))
        assert time.monotonic() - started_s < 30.0, "there was no sign of it but its silence"


WAYS = [((2, 1), (1, 2)), ((1, 1), (2, 1))]


@pytest.mark.parametrize(("from_node", "to_node"), matrix(WAYS, 1), ids=str)  # ranks, and stages
def test_a_request_goes_on_at_a_node_of_other_hosts(
    checkpoint: Path,
    host: ForkedHost,
    other_host: ForkedHost,
    expected: list[list[int]],
    from_node: tuple[int, int],
    to_node: tuple[int, int],
) -> None:
    def node(divided: tuple[int, int], host: ForkedHost) -> AbstractContextManager[DeviceRanked]:
        hosts = [] if divided == (1, 1) else [host.address]
        return device_ranked(checkpoint, divided[0], num_stages=divided[1], hosts=hosts)

    with node(from_node, host) as source, node(to_node, other_host) as destination:
        assert prefilled_and_decoded(source, destination, LENGTHS[-1]) == expected[-1]


def test_kv_comes_back_from_the_host_tier_of_every_host(
    checkpoint: Path, host: ForkedHost, expected: list[list[int]]
) -> None:
    with device_ranked(checkpoint, 2, hosts=[host.address]) as ranked:
        (request,) = requests_of(LENGTHS[-1:])
        asyncio.run(computed_after_a_load(ranked, request))
    assert request.output_token_ids == expected[-1]


async def computed_after_a_load(ranked: DeviceRanked, request: Request) -> None:
    """Compute a prompt, have its KV stored and loaded into other blocks, and go on with these."""
    node, prompt = ranked.node, request.prompt_token_ids
    assert ranked.ranks is not None
    assert ranked.ranks.hosts is not None
    async with AsyncExitStack() as stack:
        await ends(stack, ranked, "n0", tier_blocks=8)
        slots = slot_copies(slots_of(ranked.model, 8), ranked.memory)
        tier = HostTier(8, slots, ranked.ranks.hosts.kv)
        stack.callback(tier.close)
        await asyncio.to_thread(node.step, [Scheduled(request, len(prompt))])
        hashes = [bytes([number]) * 16 for number in range(len(request.block_table))]
        await tier.store(hashes, request.block_table)
        request.block_table = [node.free.pop() for _ in hashes]
        await tier.load(hashes, request.block_table)
        await asyncio.to_thread(node.generate, [request], NUM_OUTPUT)


def test_hosts_talk_over_mtls(checkpoint: Path, expected: list[list[int]], tmp_path: Path) -> None:
    """Steps and what is done with KV; gloo's own connections are in clear text."""
    pytest.importorskip("cryptography", reason="the certs extra is not installed")
    from pdserve.commands.cli.certs import make

    make(tmp_path, "node", [], datetime.timedelta(days=1))
    keys = tmp_path / "node"
    with (
        later_host(checkpoint, security=SecurityConfig(tls_dir=str(keys))) as host,
        device_ranked(
            checkpoint, 2, hosts=[host.address], security=Security(tls_dir=keys)
        ) as source,
        device_ranked(checkpoint, 1) as destination,
    ):
        tokens = prefilled_and_decoded(source, destination, LENGTHS[-1], tls=NodeTls(keys))
    assert tokens == expected[-1]


def break_agent() -> None:
    """In a process that is to be a host."""
    fork_device_ranks()

    async def broken(*_: object) -> NoReturn:
        raise RuntimeError("a bug")

    Agent.serve = broken  # type: ignore[method-assign, assignment]


@pytest.mark.long
def test_a_host_whose_agent_for_kv_has_failed_ends_the_node(checkpoint: Path) -> None:
    """Its node would wait for what it asks of it."""
    with (
        later_host(checkpoint, break_agent) as host,
        device_ranked(checkpoint, 2, hosts=[host.address]) as ranked,
    ):
        assert ranked.ranks is not None
        assert ranked.ranks.hosts is not None
        (later,) = ranked.ranks.hosts._hosts
        assert later._order.devices is not None
        with socket.create_connection(split_address(host.address), timeout=30.0) as sock:
            sock.sendall(later._order.devices.secret)
            end_s = time.monotonic() + 30.0
            while not ranked.ranks.lost and time.monotonic() < end_s:
                time.sleep(0.01)
        why = "its agent for KV has failed: RuntimeError('a bug')"
        assert ranked.ranks.lost == f"host {host.address}: {why}"


def test_a_lost_host_is_named_once(
    checkpoint: Path, host: ForkedHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = f"host {host.address}: it is gone"

    async def begin(self: FarHost, sock: socket.socket, *_: object) -> NoReturn:
        sock.close()
        self.lost = "it is gone"
        raise PeerLost(lost)

    monkeypatch.setattr(FarHost, "begin", begin)
    with device_ranked(checkpoint, 2, hosts=[host.address]) as ranked:
        assert ranked.ranks is not None
        with pytest.raises(NodeSick, match=f"^rank_lost: {lost}$"):
            asyncio.run(computed_after_a_load(ranked, make_request(make_prompt(9))))
        with pytest.raises(NodeSick, match=f"^rank_lost: {lost}$"):
            ranked.node.logits(make_prompt(9))
        assert ranked.ranks.lost == lost


class WholeResult(msgspec.Struct):
    """A HostResult, and nothing that only looks like one."""

    num_states: int
    error: str


def test_a_host_that_refuses_says_why(checkpoint: Path, host: ForkedHost) -> None:
    stranger = Security(token="x" * 16)
    with (
        pytest.raises(NodeSick, match="the join token is not the one here"),
        device_ranked(checkpoint, 2, hosts=[host.address], security=stranger),
    ):
        pass
    model = model_of(checkpoint, 2, hosts=[host.address])
    (later,) = LaterHosts(model, "127.0.0.1:1", stranger, shares_kv=True)._hosts
    stream = HostStream(socket.create_connection(split_address(host.address), timeout=30.0))
    stream.send(later._order)
    assert "join token" in stream.receive(WholeResult, within_s=30.0).error
    stream.close()


@pytest.mark.long  # a coordinator does by default
def test_a_host_with_other_weights_refuses(checkpoint: Path, tmp_path: Path) -> None:
    other = make_checkpoint(tmp_path / "other", "qwen3", seed=1)
    with (
        later_host(other) as host,
        pytest.raises(NodeSick, match="start pdserve rank with the same --model"),
        device_ranked(checkpoint, 2, hosts=[host.address]),
    ):
        pass
