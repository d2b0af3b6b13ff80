"""The side that needs the blocks: connects to an exporter, pulls by ticket into its own pool.

A pull, step by step: read the ticket, plan the spans, let the link's channel copy them and
validate the generations, count. The one promise that everything else leans on is `Puller.pull`'s:
once it has returned or raised, nothing will write to the destination blocks any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from kv_transfer.handshake import KvIdentity
from kv_transfer.link import Link, open_link
from kv_transfer.memory import ExportedPool
from kv_transfer.plan import BlockRun, Spans, plan_spans
from kv_transfer.statistics import PullerStatistics
from kv_transfer.threads import CancelFlag, CopyThreads
from kv_transfer.ticket import Ticket, read_ticket
from kv_transfer.transports.catalog import KINDS, TransportFactory
from kv_transfer.transports.interface import Read
from pdserve.errors import (
    StaleIncarnation,
    StaleTicket,
    TicketInvalid,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)
from pdserve.protocol import ExporterWelcome

DEFAULT_TRANSPORTS = tuple(kind.client for kind in KINDS.values())


@dataclass(frozen=True, slots=True)
class PullResult:
    """What a complete and valid pull has moved."""

    bytes: int
    seconds: float
    first_token: int  # of the ticket; tokens [first_token, end_token) are here now
    end_token: int


class Puller:
    """Pulls KV into one pool. Uses the pool, owns its threads; links are their user's to close.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        pool: ExportedPool,
        identity: KvIdentity,
        host_id: str,
        transports: Sequence[TransportFactory] = DEFAULT_TRANSPORTS,
        num_threads: int = 4,
    ) -> None:
        if pool.block_bytes != identity.layout.block_bytes:
            raise ValueError(
                f"the pool has blocks of {pool.block_bytes} bytes, the layout of "
                f"{identity.layout.block_bytes}"
            )
        self.statistics = PullerStatistics()
        self._pool = pool
        self._identity = identity
        self._host_id = host_id
        self._threads = CopyThreads(num_threads, "kv-pull")
        self._transports = [factory(self._threads) for factory in transports]

    async def connect(self, welcome: ExporterWelcome, timeout_s: float) -> Link:
        """A link to the exporter that sent this welcome.

        Raises:
            LayoutMismatch: its KV is of another model, or cannot be laid out as ours.
            TransferTimeout, PeerLost: it cannot be reached; with each transport's reason.
        """
        self._identity.check_peer(welcome.node_id, welcome.fingerprint, welcome.layout)
        return await open_link(welcome, self._host_id, self._transports, timeout_s)

    async def pull(
        self,
        link: Link,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
    ) -> PullResult:
        """Pull the ticket's tokens from `from_token` on into the blocks of `block_table`.

        `block_table[i]` holds the request's tokens from i * block_size on, so it starts at token 0
        whatever the ticket covers. The result is complete and valid; after an error, these tokens'
        slots hold anything. When this has returned or raised - also by cancellation - nothing will
        write to the blocks any more.

        Raises:
            TicketInvalid: garbled, expired, or of another exporter.
            StaleIncarnation: of another life of this exporter.
            StaleTicket: a block changed hands before or while it was read.
            TransferTimeout: not complete within `timeout_s` seconds.
            TransferCancelled: the link was closed.
            PeerLost: the exporter is gone.
            ValueError: the block table does not cover the tokens, or names blocks we do not have.
        """
        started_s = time.perf_counter()
        with self._counted():
            async with link.pulling(timeout_s):
                opened = _read_ticket_of(link.welcome, ticket)
                num_bytes = await self._pull(link, ticket, opened, block_table, from_token)
        seconds = time.perf_counter() - started_s
        result = PullResult(num_bytes, seconds, opened.first_token, opened.end_token)
        self.statistics.pulls += 1
        self.statistics.bytes += result.bytes
        self.statistics.seconds += result.seconds
        return result

    def close(self) -> None:
        """End the threads; call when every link is closed."""
        self._threads.close()

    async def _pull(
        self,
        link: Link,
        sealed: bytes,
        ticket: Ticket,
        block_table: Sequence[int],
        from_token: int,
    ) -> int:
        begin, end = max(ticket.first_token, from_token), ticket.end_token
        if begin >= end:
            return 0
        block_size = link.welcome.layout.block_size
        block_ids, generations = ticket.blocks_between(begin, end, block_size)
        source = BlockRun(link.welcome.layout, block_ids, begin // block_size)
        read = Read(
            sealed=sealed,
            begin=begin,
            end=end,
            block_ids=block_ids,
            generations=generations,
            spans=await self._plan(source, self._destination(block_table), begin, end),
            destination=self._pool.flat,
        )
        await link.read(read)
        return read.num_bytes

    def _destination(self, block_table: Sequence[int]) -> BlockRun:
        block_ids = np.array(block_table, dtype=np.int64)
        if len(block_ids) and not 0 <= block_ids.min() <= block_ids.max() < self._pool.num_blocks:
            raise ValueError(f"the block table names blocks outside of 0..{self._pool.num_blocks}")
        return BlockRun(self._identity.layout, block_ids)

    async def _plan(self, source: BlockRun, destination: BlockRun, begin: int, end: int) -> Spans:
        plan = partial(plan_spans, source, destination, begin, end)
        if source.layout == destination.layout:
            return plan()  # a span a block: microseconds
        # Re-laying out takes a span per token run, layer and head: too many for the event loop.
        return await self._threads.run(plan, CancelFlag())

    @contextmanager
    def _counted(self) -> Iterator[None]:
        try:
            yield
        except StaleTicket:
            self.statistics.stale += 1
            raise
        except TransferTimeout:
            self.statistics.timeouts += 1
            raise
        except (TransferCancelled, asyncio.CancelledError):
            self.statistics.cancelled += 1
            raise
        except (TransferError, StaleIncarnation):
            self.statistics.failed += 1
            raise


def _read_ticket_of(exporter: ExporterWelcome, sealed: bytes) -> Ticket:
    """The ticket, fitting this exporter as far as a puller can tell."""
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
    ticket.check(exporter.num_blocks, exporter.layout.block_size)
    return ticket
