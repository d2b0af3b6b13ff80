"""The side that needs the blocks: connects to exporters, and pulls by ticket into its own pool.

The steps of a pull: read the ticket, plan the spans, let the link's channel copy them and validate
the generations. Everything else relies on one guarantee of `Puller.pull`: once it has returned or
raised, nothing writes to the destination blocks any more.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from kv_transfer.checksum import check_arrived
from kv_transfer.handshake import KvIdentity
from kv_transfer.link import Link, open_link
from kv_transfer.memory import KvPool, cpu_pool
from kv_transfer.spans.box import BlockRun, KvBox
from kv_transfer.spans.plan import Spans, is_quick, plan_spans, split_box
from kv_transfer.spans.shards import common_heads
from kv_transfer.statistics import PullerStatistics
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.ticket import Ticket, read_ticket
from kv_transfer.transports.catalog import KINDS, TransportKind
from kv_transfer.transports.interface import Read, Reader
from kv_transfer.transports.tls import NodeTls
from pdserve.errors import (
    CorruptTransfer,
    StaleIncarnation,
    TicketInvalid,
    TransferError,
)
from pdserve.protocol import ExporterWelcome
from pdserve.protocol.version import check_protocol
from pdserve.simulated_link import SimulatedLink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PullResult:
    """The result of a complete and valid pull."""

    bytes: int
    seconds: float
    read_s: float  # part of it: copying and validating in the transport


class Pulls(Protocol):
    """Pulls blocks (`Puller`)."""

    async def pull(
        self,
        link: Link,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
    ) -> PullResult:
        """As Puller.pull, of all the heads that both sides have."""
        ...


class Puller:
    """Pulls KV into one pool. Uses the pool, owns its threads; the caller closes the links.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        pool: KvPool,
        identity: KvIdentity,
        host_id: str,
        kinds: Sequence[TransportKind] = KINDS,
        *,
        name: str = "",
        num_threads: int = 4,
        simulated: Callable[[str], SimulatedLink | None] = lambda node_id: None,
        tls: NodeTls | None = None,
    ) -> None:
        """`simulated` returns the network to simulate from an exporter, by its node id."""
        if pool.block_bytes != identity.layout.block_bytes:
            raise ValueError(
                f"the pool has blocks of {pool.block_bytes} bytes, the layout of "
                f"{identity.layout.block_bytes}"
            )
        self.statistics = PullerStatistics()
        self._pool = pool
        self._identity = identity
        self._simulated = simulated
        self._threads = CopyThreads(num_threads, "kv-pull")
        reader = Reader(name or secrets.token_hex(8), host_id, pool, self._threads, tls)
        self._transports = [kind.client(reader) for kind in kinds if not kind.obstacle(pool)]

    async def connect(self, welcome: ExporterWelcome, timeout_s: float) -> Link:
        """A link to the exporter that sent this welcome.

        Raises:
            ConfigError: it is of a build that we do not understand.
            LayoutMismatch: its KV is of another model, or its layout is incompatible with ours.
            TransferTimeout, PeerLost: it cannot be reached; with the reason for each transport.
        """
        check_protocol(welcome.protocol, welcome.node_id)
        self._identity.check_peer(welcome.node_id, welcome.fingerprint, welcome.layout)
        simulated = self._simulated(welcome.node_id)
        return await open_link(welcome, self._transports, timeout_s, self.statistics, simulated)

    async def pull(
        self,
        link: Link,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
        heads: range | None = None,
    ) -> PullResult:
        """Pull the ticket's tokens from `from_token` on into the blocks of `block_table`.

        Block `block_table[i]` holds the request's tokens from i * block_size on: the table begins
        at token 0, whatever the ticket covers. `heads` are the KV heads to pull from this exporter,
        if several have them (`choose_shards`); None: all that both sides have. After an error the
        content of these tokens' slots is undefined. Once this has returned or raised, also by
        cancellation, nothing writes to the blocks any more.

        Raises:
            TicketInvalid: malformed, expired, of another exporter, or for more tokens than the
                block table has room for.
            StaleIncarnation: of another incarnation of this exporter.
            StaleTicket: a block was reused before or while it was read.
            LayoutMismatch: converting the layout would take millions of copies.
            TransferTimeout: not complete within `timeout_s` seconds.
            TransferCancelled: the link was closed.
            CorruptTransfer: the checksums were wrong, twice.
            PeerLost: the exporter is gone.
            ValueError: the block table or `heads` is invalid for our pool.
        """
        started_s = time.perf_counter()
        try:
            async with link.pulling(timeout_s):
                opened = _read_ticket_of(link.welcome, ticket)
                box = _box_of(opened, link, self._identity, from_token, heads)
                num_bytes, read_s = 0, 0.0
                if not box.is_empty:
                    num_bytes, read_s = await self._pull(link, ticket, opened, box, block_table)
        except (TransferError, StaleIncarnation, asyncio.CancelledError) as error:
            self.statistics.count(error)
            raise
        result = PullResult(num_bytes, time.perf_counter() - started_s, read_s)
        self.statistics.pulls += 1
        self.statistics.bytes += result.bytes
        self.statistics.seconds += result.seconds
        return result

    async def close(self) -> None:
        """Close the transports and end the threads; call it after closing all links.

        Everything is closed, even if one transport fails.
        """
        async with AsyncExitStack() as closing:
            closing.callback(self._threads.close)
            for transport in self._transports:
                closing.push_async_callback(transport.close)

    async def _pull(
        self, link: Link, sealed: bytes, ticket: Ticket, box: KvBox, block_table: Sequence[int]
    ) -> tuple[int, float]:
        """Pull a non-empty box: (bytes moved, seconds in the transport)."""
        room = len(block_table) * self._identity.layout.block_size
        if box.end > room:
            raise TicketInvalid(
                f"the ticket of {ticket.node_id!r} is for tokens up to {box.end}, the block table "
                f"for {room}"
            )
        destination = self._destination(block_table)
        moved = await self._read(link, sealed, ticket, box, destination)
        if ticket.checksums and self._pool.kind == "cpu":
            check = partial(
                check_arrived,
                ticket,
                link.welcome.layout,
                cpu_pool(self._pool).flat,
                destination,
                box,
            )
            try:
                await self._threads.run(check, CancelFlag())
            except CorruptTransfer as error:
                log.warning("%s", error)
                self.statistics.corrupt += 1
                self.statistics.retried += 1
                moved = await self._read(link, sealed, ticket, box, destination)
                await self._threads.run(check, CancelFlag())
        return moved

    async def _read(
        self, link: Link, sealed: bytes, ticket: Ticket, box: KvBox, destination: BlockRun
    ) -> tuple[int, float]:
        """Read the box, one read per plan: (bytes moved, seconds in the transport)."""
        layout = link.welcome.layout
        num_bytes, read_s = 0, 0.0
        for part in split_box(layout, destination.layout, box):
            block_ids, generations = ticket.blocks_between(part.begin, part.end, layout.block_size)
            source = BlockRun(layout, block_ids, part.begin // layout.block_size)
            spans = await self._plan(source, destination, part)
            read = Read(
                sealed, part, block_ids, generations, spans, part.num_bytes(layout), self._pool
            )
            started_s = time.perf_counter()
            await link.read(read)
            read_s += time.perf_counter() - started_s
            num_bytes += read.num_bytes
        return num_bytes, read_s

    def _destination(self, block_table: Sequence[int]) -> BlockRun:
        num_blocks = self._pool.num_blocks
        block_ids = np.array(block_table, dtype=np.int64)
        if len(block_ids) and not 0 <= min(block_table) <= max(block_table) < num_blocks:
            raise ValueError(f"the block table names blocks outside of 0..{num_blocks}")
        return BlockRun(self._identity.layout, block_ids)

    async def _plan(self, source: BlockRun, destination: BlockRun, box: KvBox) -> Spans:
        plan = partial(plan_spans, source, destination, box)
        if is_quick(source.layout, destination.layout, box):
            return plan()
        return await self._threads.run(plan, CancelFlag())


def _read_ticket_of(exporter: ExporterWelcome, sealed: bytes) -> Ticket:
    """Read a ticket, and check that it fits the exporter, as far as a puller can tell."""
    ticket = read_ticket(sealed)
    if ticket.node_id != exporter.node_id or ticket.fingerprint != exporter.fingerprint:
        raise TicketInvalid(
            f"a ticket of {ticket.node_id!r} for KV {ticket.fingerprint} was given to a link to "
            f"{exporter.node_id!r} with KV {exporter.fingerprint}"
        )
    if ticket.incarnation != exporter.incarnation:
        raise StaleIncarnation(
            f"the ticket is of incarnation {ticket.incarnation!r} of {ticket.node_id!r}, the link "
            f"of {exporter.incarnation!r}"
        )
    ticket.check(exporter.num_blocks, exporter.layout)
    return ticket


def _box_of(
    ticket: Ticket, link: Link, identity: KvIdentity, from_token: int, heads: range | None
) -> KvBox:
    """The part of the ticket that is to be pulled."""
    heads = common_heads(link.welcome.layout, identity.layout) if heads is None else heads
    return KvBox(
        max(ticket.first_token, from_token),
        ticket.end_token,
        ticket.first_layer,
        ticket.end_layer,
        heads.start,
        heads.stop,
    )
