"""Counters of the two ends of the KV transfer; a node exports them as metrics.

They are written on the event loop's thread only.
"""

from __future__ import annotations

from asyncio import CancelledError
from dataclasses import dataclass

from pdserve.shared.errors import (
    CorruptTransfer,
    StaleIncarnation,
    StaleTicket,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)


@dataclass(slots=True)
class ExporterStatistics:
    """Counted by the exporter, which does not see the pulls of one-sided transports."""

    tickets_issued: int = 0
    pools_shared: int = 0  # pullers admitted to read the pool directly (shm, cuda_ipc, ucx)
    pulls_served: int = 0  # complete and valid requests (tcp, nccl)
    bytes_sent: int = 0
    stale: int = 0  # pulls that failed because a block was reused
    refused: int = 0  # invalid tickets, access tokens or hellos
    broken: int = 0  # pulls whose puller disconnected or stalled
    garbage: int = 0  # connections that broke the protocol, or came from another user
    turned_away: int = 0  # connections over the limit; they, or idle ones, were closed


@dataclass(slots=True)
class PullerStatistics:
    """Counted by the puller."""

    pulls: int = 0  # complete and valid
    bytes: int = 0  # of these pulls
    seconds: float = 0.0  # of these pulls
    coded_bytes: int = 0  # of the pool, in reads that were sent with a codec
    sent_coded: int = 0  # bytes that these took on the network
    stale: int = 0
    timeouts: int = 0
    cancelled: int = 0
    failed: int = 0  # peer lost, ticket refused
    corrupt: int = 0  # wrong checksums
    retried: int = 0  # reads retried over the same transport
    replanned: int = 0  # reads retried over another transport

    def count(self, error: TransferError | StaleIncarnation | CancelledError) -> None:
        """Count a pull that ended with this error."""
        match error:
            case StaleTicket():
                self.stale += 1
            case TransferTimeout():
                self.timeouts += 1
            case CorruptTransfer():
                self.corrupt += 1
            case TransferCancelled() | CancelledError():
                self.cancelled += 1
            case _:
                self.failed += 1
