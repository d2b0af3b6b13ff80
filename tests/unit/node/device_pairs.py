"""What one rank computes, and what two nodes with device ranks have to come to together."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from kv_transfer.exporter import Exporter, SpreadPool
from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.puller import Puller
from kv_transfer.sharded_pool import ShardedPool
from kv_transfer.transports.catalog import choose_kinds
from kv_transfer.transports.tls import NodeTls
from pdserve.engine.request import Request, Scheduled
from pdserve.node.device_hosts.later_hosts import KvSettings
from pdserve.shared.clock import ManualClock
from tests.requests import make_request
from tests.unit.engine_model.harness import DecoderKind, Node, make_prompt
from tests.unit.node.device_ranked import DeviceRanked

NUM_OUTPUT = 10


def requests_of(lengths: Sequence[int]) -> list[Request]:
    """A request for each length of a prompt."""
    return [make_request(make_prompt(length, seed=length)) for length in lengths]


def tokens_of_one_rank(checkpoint: Path, lengths: Sequence[int]) -> list[list[int]]:
    """NUM_OUTPUT for each of these requests."""
    requests = requests_of(lengths)
    Node.load(checkpoint, DecoderKind.TORCH).generate(requests, NUM_OUTPUT)
    return [request.output_token_ids for request in requests]


def prefilled_and_decoded(
    source: DeviceRanked,
    destination: DeviceRanked,
    length: int,
    kind: str = "tcp",
    tls: NodeTls | None = None,
) -> list[int]:
    """NUM_OUTPUT for one of these requests, the first one by another node than the others.

    As in a handoff, a migration, or a prefix pull; `kind` is the transport.
    """
    first, then = requests_of((length, length))
    num_blocks = destination.model.layout.blocks_for(length)
    then.block_table = [destination.node.free.pop() for _ in range(num_blocks)]
    asyncio.run(_move(source, destination, first, then, kind, tls))
    return then.output_token_ids


async def _move(
    source: DeviceRanked,
    destination: DeviceRanked,
    first: Request,
    then: Request,
    kind: str,
    tls: NodeTls | None,
) -> None:
    """Compute a prompt, pull its KV, and go on."""
    num_tokens = len(first.prompt_token_ids)
    async with AsyncExitStack() as stack:
        exporter, _ = await ends(stack, source, "p0", kind, tls)
        _, puller = await ends(stack, destination, "d0", kind, tls)
        source.memory.bump(range(source.model.num_blocks))
        await asyncio.to_thread(source.node.step, [Scheduled(first, num_tokens)])
        welcome = exporter.welcome()
        await exporter.introduce(welcome)
        link = await puller.connect(welcome, 30.0)
        stack.push_async_callback(link.close)
        ticket = exporter.issue("r", 0, num_tokens, first.block_table)
        await puller.pull(link, ticket, then.block_table, 0, 30.0)
        then.output_token_ids += first.output_token_ids
        then.num_computed_tokens = num_tokens
        await asyncio.to_thread(destination.node.generate, [then], NUM_OUTPUT)


async def ends(
    stack: AsyncExitStack,
    node: DeviceRanked,
    name: str,
    kind: str = "tcp",
    tls: NodeTls | None = None,
    tier_blocks: int = 0,
) -> tuple[Exporter, Puller]:
    """The exporter and the puller of a node, and what its hosts have of them."""
    model, clock, kinds = node.model, ManualClock(100.0), choose_kinds([kind], node.memory)
    hosts = None if node.ranks is None else node.ranks.hosts
    far = [] if hosts is None else hosts.kv
    num_stages = model.share.parallelism.pipeline
    identity = KvIdentity("a-model", "main", model.layout, num_stages)
    exporter = Exporter(
        name, "life-1", identity, node.memory, clock, kinds, tls=tls, spread=SpreadPool(far)
    )
    puller = Puller(node.memory, identity, host_id(), kinds, tls=tls, hosts=far)
    stack.push_async_callback(exporter.close)
    stack.push_async_callback(puller.close)
    await exporter.start("127.0.0.1")
    if hosts is not None:
        assert isinstance(node.memory, ShardedPool)
        stack.push_async_callback(hosts.leave_kv)
        settings = KvSettings([kind], kv_port=0, links=[], tier_blocks=tier_blocks)
        await hosts.share_kv(exporter, node.memory, settings, clock)
    return exporter, puller
