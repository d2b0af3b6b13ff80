"""The seam between the KV transfer and the means of moving its bytes.

A transport is a pair: a `TransportServer` in the process that has the blocks, and a `Transport` in
the process that needs them. `Transport.connect` gives a `Channel` to one exporter, whose one verb
is `read`. One-sided transports (shared memory, CUDA IPC, UCX) copy the spans themselves and then
look at the generations; two-sided ones (TCP, NCCL) send ticket and box, and the exporter looks.
What all of them promise is on `Channel.read`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer.memory import KvPool
from kv_transfer.plan import KvBox, Spans
from kv_transfer.statistics import ExporterStatistics
from kv_transfer.threads import CopyThreads
from kv_transfer.ticket import Ticket
from pdserve.kv_layout import KvLayout
from pdserve.protocol import ExporterWelcome, TransportOffer


@dataclass(frozen=True, slots=True)
class Read:
    """One pull, planned: everything a transport needs to carry it out."""

    sealed: bytes  # the ticket as it came
    box: KvBox  # within the ticket's
    block_ids: NDArray[np.int64]  # the source blocks that hold the box
    generations: NDArray[np.uint64]  # expected, one for each of them
    spans: Spans  # [n, 3] (source_offset, destination_offset, nbytes), ascending in the source
    destination: KvPool  # the puller's

    @property
    def num_bytes(self) -> int:
        """Bytes that will land in the destination."""
        return int(self.spans[:, 2].sum())


class Source(Protocol):
    """What a transport's server may ask of the exporter."""

    @property
    def name(self) -> str:
        """Unique to this life of this exporter."""
        ...

    @property
    def layout(self) -> KvLayout:
        """Of the exported pool."""
        ...

    @property
    def pool(self) -> KvPool:
        """Outlives every server."""
        ...

    @property
    def statistics(self) -> ExporterStatistics:
        """The server counts what it sees."""
        ...

    def check_access(self, token: bytes) -> None:
        """That a connection comes from a puller with an open session; before anything else.

        Raises:
            AccessDenied: it does not.
        """
        ...

    def open_ticket(self, sealed: bytes) -> Ticket:
        """The ticket, verified and fitting the pool.

        Raises:
            TicketInvalid, StaleIncarnation: as TicketSealer.open.
        """
        ...


class TransportServer(Protocol):
    """The exporter's end. Whatever arrives at it, it neither crashes nor blocks the process."""

    async def start(self, host: str, advertised_host: str) -> TransportOffer:
        """Listen (on `host`, where hosts mean something), and say where.

        Raises:
            OSError: the address cannot be listened on.
            TransportUnavailable: this process cannot serve it, for a reason that is not an error.
        """
        ...

    async def close(self) -> None:
        """Stop listening, end every connection and thread: nothing reads the pool any more."""
        ...


class Channel(Protocol):
    """The puller's means of reading one exporter's pool; any number of reads may be in flight."""

    async def read(self, read: Read) -> None:
        """Copy the spans' bytes to the destination and validate the generations after.

        Ends without an error only when the bytes are what the ticket means. When it has returned
        or raised - also by cancellation, which is how deadlines arrive - nothing will write to the
        destination any more; a transport that cannot stop a transfer does not return before the
        transfer has ended.

        Raises:
            StaleTicket: a block changed hands.
            TicketInvalid, StaleIncarnation, AccessDenied: the exporter refused.
            PeerLost: the exporter is gone, or is no exporter.
        """
        ...

    async def close(self) -> None:
        """Let go of sockets and mappings; no read is in flight."""
        ...


@dataclass(frozen=True, slots=True)
class Reader:
    """What a puller's transports are made with."""

    name: str  # unique to this life of this puller
    host_id: str
    pool: KvPool  # that everything is pulled into
    threads: CopyThreads


class Transport(Protocol):
    """The puller's end of one means of moving bytes."""

    @property
    def name(self) -> str:
        """What an offer of it is called."""
        ...

    def obstacle(self, offer: TransportOffer, welcome: ExporterWelcome) -> str | None:
        """Why it cannot work between us and this exporter, as far as one can tell without trying.

        None: worth trying.
        """
        ...

    async def connect(self, offer: TransportOffer, welcome: ExporterWelcome) -> Channel:
        """A channel that has been seen to work. The caller sets the deadline, by cancelling.

        Raises:
            PeerLost: nobody there, not the exporter, or no access.
        """
        ...

    async def close(self) -> None:
        """Let go of what the channels shared; all of them are closed."""
        ...
