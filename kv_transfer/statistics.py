"""What the two ends of the KV transfer count; a node turns these into metrics.

Written on the event loop's thread only; every field only grows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ExporterStatistics:
    """Counted where the blocks are. One-sided transports pull without the exporter's knowing."""

    tickets_issued: int = 0
    pools_shared: int = 0  # pullers that were let read the pool themselves (shm, cuda_ipc, ucx)
    pulls_served: int = 0  # two-sided, complete and valid
    bytes_sent: int = 0
    stale: int = 0  # pulls that ended because a block had changed hands
    refused: int = 0  # tickets or hellos that did not verify
    broken: int = 0  # pulls whose puller went away or stalled
    garbage: int = 0  # connections that said nonsense, or came from another user
    turned_away: int = 0  # connections that found the table full; an idle one was closed, or they


@dataclass(slots=True)
class PullerStatistics:
    """Counted where the blocks go."""

    pulls: int = 0  # complete and valid
    bytes: int = 0  # of these
    seconds: float = 0.0  # of these
    stale: int = 0
    timeouts: int = 0
    cancelled: int = 0
    failed: int = 0  # peer lost, ticket refused
    corrupt: int = 0  # checksums that did not fit
    retried: int = 0  # reads begun again over the same transport
    replanned: int = 0  # reads begun again over another transport
