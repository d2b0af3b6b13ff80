"""The interface between the KV transfer and its transports.

A transport is a pair: a `TransportServer` in the process that has the blocks, and a `Transport` in
the process that needs them. `Transport.connect` returns a `Channel` to one exporter, whose only
operation is `read`. One-sided transports (shared memory, CUDA IPC, UCX) copy the spans and then
check the generations themselves. Two-sided ones (TCP, NCCL) send ticket and box to the exporter,
which checks the generations. The guarantees of all of them are in `Channel.read`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.checksum import Summing
from kv_transfer.codecs.choice import Sending
from kv_transfer.memory import KvPool
from kv_transfer.spans.box import KvBox
from kv_transfer.spans.plan import Spans
from kv_transfer.statistics import ExporterStatistics
from kv_transfer.threads import CopyThreads
from kv_transfer.ticket import Ticket
from kv_transfer.transports.tls import NodeTls
from pdserve.kv import KvLayout
from pdserve.protocol import ExporterWelcome, TransportOffer


class Read(msgspec.Struct, frozen=True, eq=False):
    """One planned read: everything that a transport needs to carry it out."""

    sealed: bytes  # the ticket
    box: KvBox  # the part of it that is read
    block_ids: NDArray[np.int64]  # the source blocks of the box
    generations: NDArray[np.uint64]  # their expected generations
    spans: Spans  # [n, 3] (source_offset, destination_offset, nbytes), in the source's order
    num_bytes: int  # of all spans
    destination: KvPool  # the puller's pool
    summing: Summing | None = None  # of spans within blocks; a copy may add them up meanwhile
    sending: Sending | None = None  # how bytes pass a network, of a transport that has codecs


class Source(Protocol):
    """What the server of a transport uses of the exporter."""

    @property
    def name(self) -> str:
        """Unique to this incarnation of the exporter."""
        ...

    @property
    def layout(self) -> KvLayout:
        """The layout of the exported pool."""
        ...

    @property
    def pool(self) -> KvPool:
        """The exported pool, which outlives all servers."""
        ...

    @property
    def statistics(self) -> ExporterStatistics:
        """Counters for the server to update."""
        ...

    @property
    def tls(self) -> NodeTls | None:
        """How connections over a network are secured; None: not at all."""
        ...

    def check_access(self, token: bytes) -> None:
        """Check that a connection belongs to an open session, before anything else is read.

        Raises:
            AccessDenied: it does not.
        """
        ...

    def has_access(self, token: bytes) -> bool:
        """Whether it does: for one that was checked before."""
        ...

    def open_ticket(self, sealed: bytes) -> Ticket:
        """Verify a ticket, and check that it fits the pool.

        Raises:
            TicketInvalid, StaleIncarnation: as TicketSealer.open.
        """
        ...


class TransportServer(Protocol):
    """The exporter's end. No input may crash or block the process."""

    async def start(self, host: str, advertised_host: str, port: int = 0) -> TransportOffer:
        """Start serving, on `host` if the transport uses a network; returns the offer.

        It listens on `port`, or on any free one for port 0.

        Raises:
            OSError: the address cannot be bound.
            TransportUnavailable: this process cannot serve it; the offer will say why.
        """
        ...

    async def close(self) -> None:
        """Stop serving, and end all connections and threads: nothing reads the pool any more."""
        ...


class Channel(Protocol):
    """Reads from one exporter's pool; any number of reads may be in flight."""

    async def read(self, read: Read) -> None:
        """Copy the spans to the destination, then validate the generations.

        Returns normally only if the bytes are what the ticket names. Once it has returned or
        raised, also by cancellation (which is how deadlines are enforced), nothing writes to the
        destination any more: a transport that cannot stop a transfer waits for its end.

        Raises:
            StaleTicket: a block was reused.
            TicketInvalid, StaleIncarnation, AccessDenied: the exporter refused.
            PeerLost: the exporter is gone, or violates the protocol.
        """
        ...

    async def close(self) -> None:
        """Release sockets and mappings. No read may be in flight."""
        ...


@dataclass(frozen=True, slots=True)
class Reader:
    """What a puller provides to its transports."""

    name: str  # unique to this incarnation of the puller
    host_id: str
    pool: KvPool  # the destination of all reads
    threads: CopyThreads
    tls: NodeTls | None = None  # as Source.tls


class Transport(Protocol):
    """The puller's end."""

    @property
    def name(self) -> str:
        """Its name in offers."""
        ...

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """Why it cannot work with this exporter, as far as can be told without trying.

        None: it is worth trying.
        """
        ...

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> Channel:
        """Open a channel, and check that it works. The caller enforces a deadline by cancelling.

        Raises:
            PeerLost: no answer, not the expected exporter, or no access.
        """
        ...

    async def close(self) -> None:
        """Release what the channels shared. All channels must be closed."""
        ...
