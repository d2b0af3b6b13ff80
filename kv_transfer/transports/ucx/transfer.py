"""A transfer over UCX: its slices, which are posted one after the other, and its end."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kv_transfer.spans.pieces import cut_pieces
from kv_transfer.spans.plan import Spans
from kv_transfer.transports.ucx.agent import UcxAgent, UcxRegion
from pdserve.shared.errors import PeerLost

SLICE_BYTES = 16 << 20  # a few milliseconds: how long a cancellation has to wait
_SPAN_COST_BYTES = 16 << 10  # posting a span takes about as long as copying this many bytes


def cut_slices(spans: Spans, slice_bytes: int = SLICE_BYTES) -> list[Spans]:
    """The same copies in slices: runs of spans that take about as long as copying `slice_bytes`."""
    spans = cut_pieces(spans, slice_bytes)
    cost = np.cumsum(spans[:, 2] + _SPAN_COST_BYTES)
    borders = np.flatnonzero(np.diff(cost // slice_bytes)) + 1
    return [part for part in np.split(spans, borders) if len(part)]


@dataclass(frozen=True, slots=True)
class Peer:
    """An exporter's agent that is known to our agent; it is forgotten when ours is destroyed."""

    name: str
    epoch: int  # number of our agent


@dataclass(slots=True, eq=False)
class Transfer:
    """One transfer: slices that are not posted yet, handles of those in flight, and its end."""

    peer: Peer
    source: UcxRegion
    destination: UcxRegion
    slices: deque[Spans] = field(default_factory=deque)
    ended: Future[None] = field(default_factory=Future)
    posted: deque[Any] = field(default_factory=deque)
    error: PeerLost | None = None
    abandoned_s: float | None = None  # since when only its slices in flight are waited for

    @property
    def is_over(self) -> bool:
        """Whether nothing is in flight or still to be posted."""
        return not self.posted and not self.slices

    def post(self, agent: UcxAgent) -> None:
        """Post the next slice. Raises PeerLost."""
        spans = self.slices.popleft()
        local = self.destination.describe(spans[:, 1], spans[:, 2])
        remote = self.source.describe(spans[:, 0], spans[:, 2])
        self.posted.append(
            agent.post_read(
                self.peer.name, local, self.destination.segment, remote, self.source.segment
            )
        )

    def poll(self, agent: UcxAgent) -> bool:
        """Whether the oldest posted slice has ended. Raises PeerLost: it failed."""
        handle = self.posted.popleft()
        if agent.is_done(handle):
            return True
        self.posted.appendleft(handle)
        return False

    def end(self) -> None:
        """Wake those who wait for the end."""
        if self.error is not None:
            self.ended.set_exception(self.error)
        else:
            self.ended.set_result(None)
