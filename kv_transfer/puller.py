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
from itertools import groupby
from typing import Protocol

import numpy as np

from kv_transfer.checksum import layer_groups
from kv_transfer.handshake import KvIdentity
from kv_transfer.hosts.far_host import FarHost, FarLink
from kv_transfer.links.link import Link, open_link
from kv_transfer.links.sharded_link import (
    AnyLink,
    OwnPart,
    ShardedLink,
    Strand,
    open_sharded_link,
    part_welcomes,
)
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.sharded_pool import parts_here, parts_of
from kv_transfer.spans.box import BlockRun, KvBox, boxes_from, common_heads, common_layers
from kv_transfer.statistics import PullerStatistics
from kv_transfer.strand_pull import Moved, PullTools, StrandPull, pull_blocks, twice
from kv_transfer.threads import CopyThreads, together
from kv_transfer.ticket import Ticket, read_ticket
from kv_transfer.transports.block_read import BlockRead, planner_of
from kv_transfer.transports.catalog import KINDS, TransportKind
from kv_transfer.transports.interface import Reader
from kv_transfer.transports.tls import NodeTls
from pdserve.kv import KvLayout, need
from pdserve.kv.companions import Companions
from pdserve.protocol import ExporterWelcome
from pdserve.protocol.version import check_protocol
from pdserve.shared.errors import (
    StaleIncarnation,
    StaleTicket,
    TicketInvalid,
    TransferError,
)
from pdserve.shared.simulated_link import SimulatedLink

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
        link: AnyLink,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
        *,
        num_tokens: int | None = None,
    ) -> PullResult:
        """As Puller.pull, of all the heads that both sides have."""
        ...


class Puller:
    """Pulls KV into one pool. Uses the pool, owns its threads; the caller closes the links.

    A pool of several parts is pulled into part by part, at the same time; into those of other hosts
    by these.

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
        hosts: Sequence[FarHost] = (),
        companions: Companions | None = None,
    ) -> None:
        """Nothing is connected yet.

        Args:
            pool: the destination of all pulls.
            identity: what its KV is of.
            host_id: of this host.
            kinds: of transports, best first.
            name: unique to this incarnation of the node; empty: a random one.
            num_threads: that copy, at least.
            simulated: returns the network to simulate from an exporter, by its node id.
            tls: how connections are secured.
            hosts: that have other parts of the pool.
            companions: of the pool's blocks, at any time.
        """
        self.statistics = PullerStatistics()
        self._pools = parts_of(pool)
        self._layouts = layouts = identity.check_pools(self._pools)
        self._hosts = hosts
        self._identity = identity
        self._companions = companions
        self._has_windows = any(identity.windows)
        self._simulated = simulated
        self._threads = CopyThreads(max(num_threads, len(layouts)), "kv-pull")
        groups = layer_groups(identity.windows, identity.layout.total_layers)
        self._tools = PullTools(groups, self._threads, self.statistics)
        is_whole = len(self._pools) == 1 and not hosts
        self._planner = (
            planner_of(layouts[0], self._pools[0], max(groups) + 1) if is_whole else None
        )
        own_name = name or secrets.token_hex(8)
        self._parts: list[OwnPart] = []
        for number, part in parts_here(pool).items():
            part_name = f"{own_name}/{number}" if number else own_name
            reader = Reader(part_name, host_id, part, self._threads, tls)
            clients = [kind.client(reader) for kind in kinds if not kind.obstacle(part)]
            self._parts.append(OwnPart(number, layouts[number], clients))

    async def connect(self, welcome: ExporterWelcome, timeout_s: float) -> AnyLink:
        """A link to the exporter that sent this welcome.

        Raises:
            ConfigError: it is of a build that we do not understand.
            LayoutMismatch: its KV is of another model, or its layout is incompatible with ours.
            TransferTimeout, PeerLost: it cannot be reached; with the reason for each transport.
        """
        check_protocol(welcome.protocol, welcome.node_id)
        self._identity.check_peer(welcome.node_id, welcome.fingerprint, welcome.layout)
        simulated = self._simulated(welcome.node_id)
        theirs = part_welcomes(welcome)
        if len(theirs) == len(self._pools) == 1:
            transports = self._parts[0].transports
            return await open_link(welcome, transports, timeout_s, self.statistics, simulated)
        return await open_sharded_link(
            welcome, theirs, self._parts, timeout_s, self.statistics, simulated, self._hosts
        )

    async def pull(
        self,
        link: AnyLink,
        ticket: bytes,
        block_table: Sequence[int],
        from_token: int,
        timeout_s: float,
        heads: range | None = None,
        *,
        num_tokens: int | None = None,
    ) -> PullResult:
        """Pull the ticket's tokens from `from_token` on into the blocks of `block_table`.

        The blocks of `block_table` hold the request's tokens one after the other: the table begins
        at token 0, whatever the ticket covers. `heads` are the KV heads to pull from this exporter,
        if several have them (`choose_shards`); None: all that both sides have. After an error the
        content of these tokens' slots is undefined. Once this has returned or raised, also by
        cancellation, nothing writes to the blocks any more. With `num_tokens`, no more of layers
        with windows is needed than to go on behind so many tokens.

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
                few = self._few_blocks(link, ticket, opened, block_table, from_token)
                if few is not None and heads is None and not self._skips(num_tokens):
                    pulled = await twice(partial(pull_blocks, *few), self.statistics)
                else:
                    pulls = [
                        self._pull(strand, ticket, opened, box, block_table, num_tokens)
                        for strand in self._strands(link, heads)
                        if not (box := _box_of(opened, strand, from_token)).is_empty
                    ]
                    pulls += [
                        _far_pull(far, ticket, block_table, from_token, timeout_s, num_tokens)
                        for far in _far_links(link)
                    ]
                    pulled = _in_all(await together(pulls))
        except (TransferError, StaleIncarnation, asyncio.CancelledError) as error:
            self.statistics.count(error)
            raise
        seconds = time.perf_counter() - started_s
        result = PullResult(pulled.num_bytes, seconds, pulled.read_s)
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
            for part in self._parts:
                for transport in part.transports:
                    closing.push_async_callback(transport.close)

    def _skips(self, num_tokens: int | None) -> bool:
        """Whether there may be layers of which not all tokens are needed, to go on behind these."""
        return self._has_windows and num_tokens is not None

    def _few_blocks(
        self,
        link: AnyLink,
        sealed: bytes,
        ticket: Ticket,
        block_table: Sequence[int],
        from_token: int,
    ) -> tuple[Link, BlockRead] | None:
        """The read of a small pull between pools of one layout; None: it is none."""
        planner, pool = self._planner, self._pools[0]
        if (
            planner is None
            or not isinstance(link, Link)
            or not isinstance(pool, ExportedPool)
            or link.welcome.layout != self._identity.layout
        ):
            return None
        read = planner.read(sealed, ticket, block_table, from_token, pool)
        return None if read is None else (link, read)

    def _strands(self, link: AnyLink, heads: range | None) -> Sequence[Strand]:
        """What is pulled over a link, into which part of our pool; `heads` as in `pull`."""
        if isinstance(link, ShardedLink):
            return link.strands
        layout = self._identity.layout
        theirs = link.welcome.layout
        common = common_heads(theirs, layout) if heads is None else heads
        return [Strand(0, common, common_layers(theirs, layout), link)]

    async def _pull(
        self,
        strand: Strand,
        sealed: bytes,
        ticket: Ticket,
        box: KvBox,
        block_table: Sequence[int],
        num_tokens: int | None,
    ) -> Moved:
        """Pull a non-empty box, of the heads of one strand."""
        room = self._identity.layout.tokens_in(len(block_table))
        if box.end > room:
            raise TicketInvalid(
                f"the ticket of {ticket.node_id!r} is for tokens up to {box.end}, the block table "
                f"for {room}"
            )
        destination = self._destination(strand.part, block_table)
        reads = StrandPull(
            self._tools,
            strand,
            sealed,
            ticket,
            destination,
            self._pools[strand.part],
            self._companions,
        )
        theirs, kept_from = strand.link.welcome.layout, ticket.first_token
        if theirs.windows:
            kept_from = _kept_from(ticket, theirs)
        if num_tokens is None or not self._skips(num_tokens):
            if kept_from > box.begin:
                raise StaleTicket(f"{ticket.node_id!r} has given back windows of {box}")
            return await reads.read([box])
        boxes = self._seen(box, num_tokens, kept_from)
        seen = groupby(boxes, lambda box: (box.begin, box.end))
        moved = [await reads.read(list(boxes)) for _, boxes in seen]
        return Moved(sum(each.num_bytes for each in moved), sum(each.read_s for each in moved))

    def _seen(self, box: KvBox, num_tokens: int, kept_from: int) -> list[KvBox]:
        """What of a box is seen from behind so many tokens: boxes that are not empty.

        `kept_from`: the first token from which on the exporter has layers with windows. If they
        reach further back, the stream is further by now than is known here.
        """
        size = self._identity.layout.block_size
        begins = [
            max(box.begin, kept_from, need.window_block(num_tokens, window, size) * size)
            if window
            else box.begin
            for window in self._identity.windows
        ]
        return [each for each in boxes_from(box, begins) if not each.is_empty]

    def _destination(self, part: int, block_table: Sequence[int]) -> BlockRun:
        num_blocks = self._pools[part].num_blocks
        block_ids = np.array(block_table, dtype=np.int64)
        if len(block_ids) and not 0 <= min(block_table) <= max(block_table) < num_blocks:
            raise ValueError(f"the block table names blocks outside of 0..{num_blocks}")
        return BlockRun(self._layouts[part], block_ids)


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


def _box_of(ticket: Ticket, strand: Strand, from_token: int) -> KvBox:
    """The part of the ticket that is to be pulled over a strand."""
    return KvBox(
        max(ticket.first_token, from_token),
        ticket.end_token,
        max(ticket.first_layer, strand.layers.start),
        min(ticket.end_layer, strand.layers.stop),
        strand.heads.start,
        strand.heads.stop,
    )


def _kept_from(ticket: Ticket, theirs: KvLayout) -> int:
    """The first token from which on the exporter has all layers of a ticket."""
    kinds = range(1, 1 + theirs.num_companions)
    kept = (ticket.kept_from(theirs.block_size, which) for which in kinds)
    return max(kept, default=ticket.first_token)


def _far_links(link: AnyLink) -> Sequence[FarLink]:
    return link.far if isinstance(link, ShardedLink) else ()


async def _far_pull(
    link: FarLink,
    ticket: bytes,
    block_table: Sequence[int],
    from_token: int,
    timeout_s: float,
    num_tokens: int | None,
) -> Moved:
    pulled = await link.pull(ticket, block_table, from_token, timeout_s, num_tokens)
    return Moved(pulled.num_bytes, pulled.read_s)


def _in_all(strands: Sequence[Moved]) -> Moved:
    """What strands that were pulled at the same time have moved."""
    read_s = max((strand.read_s for strand in strands), default=0.0)
    return Moved(sum(strand.num_bytes for strand in strands), read_s)
