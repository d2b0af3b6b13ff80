"""How the event loop uses a puller's UCX agent, which belongs to a thread (`thread.py`).

A posted transfer cannot be stopped. So a transfer is posted in slices of a few milliseconds;
cancelling it posts no further slice and waits for those in flight.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kv_transfer.spans.plan import Spans
from kv_transfer.transports.ucx.agent import UcxAgent, UcxRegion
from kv_transfer.transports.ucx.thread import QUARANTINE_S, UcxThread
from kv_transfer.transports.ucx.transfer import Peer, Transfer
from pdserve.shared.carry_out import carry_out
from pdserve.shared.errors import PeerLost, TransportUnavailable

T = TypeVar("T")

_PAD_ENTRIES = 4096


class UcxDriver:
    """Peers, transfers and registered scratch memory over one agent."""

    def __init__(
        self,
        make_agent: Callable[[], UcxAgent],
        region: UcxRegion,
        *,
        quarantine_s: float = QUARANTINE_S,
    ) -> None:
        """Args:
        make_agent: called on the thread; `connect` raises what it raises.
        region: the memory that is pulled into.
        quarantine_s: time after which the agent of an abandoned transfer is destroyed.
        """
        self._thread = UcxThread(make_agent, region, quarantine_s)
        self._pads: deque[NDArray[np.uint64]] = deque()  # registered and unused

    async def connect(self, name: str, metadata: bytes) -> Peer:
        """Add a peer; called once for each channel.

        Raises:
            PeerLost: it cannot be reached, or has another name.
            TransportUnavailable: this process cannot use UCX.
        """
        joined: Future[Peer] = Future()
        connect = partial(self._thread.connect, name, metadata)
        self._thread.command(partial(carry_out, connect, joined))
        try:
            return await _look_at(joined)
        except asyncio.CancelledError:
            self._thread.command(partial(self._leave_if_joined, joined))
            raise

    async def disconnect(self, peer: Peer) -> None:
        """Remove a channel; with the last one the peer is removed."""
        await self._call(partial(self._thread.disconnect, peer))

    async def transfer(
        self, peer: Peer, source: UcxRegion, destination: UcxRegion, spans: Spans
    ) -> None:
        """Copy spans of a peer's region to one of ours.

        Once it has returned or raised, also by cancellation, nothing writes to the destination.

        Raises:
            PeerLost: the peer is gone, or the agent had to be destroyed.
        """
        transfer = Transfer(peer, source, destination)
        self._thread.command(partial(self._thread.begin, transfer, spans))
        try:
            await _look_at(transfer.ended)
        except asyncio.CancelledError:
            self._thread.command(partial(self._thread.abandon, transfer))
            while not transfer.ended.done():
                # A second cancellation cannot stop UCX either; the first one is raised below.
                with suppress(asyncio.CancelledError, PeerLost):
                    await _look_at(transfer.ended)
            raise

    @asynccontextmanager
    async def scratch(self, num_entries: int) -> AsyncIterator[NDArray[np.uint64]]:
        """Registered memory for generations, uint64[num_entries], for exclusive use.

        Raises:
            PeerLost: it cannot be registered, so no generation can be read.
        """
        pad = next((pad for pad in self._pads if len(pad) >= num_entries), None)
        if pad is None:
            pad = np.zeros(max(_PAD_ENTRIES, 1 << (num_entries - 1).bit_length()), dtype=np.uint64)
            try:
                await self._call(partial(self._thread.register, pad))
            except TransportUnavailable as error:
                raise PeerLost(error.message) from error
        else:
            self._pads = deque(other for other in self._pads if other is not pad)
        try:
            yield pad[:num_entries]
        finally:
            self._pads.append(pad)

    async def close(self) -> None:
        """Destroy the agent and end the thread; no transfer is in flight. Idempotent."""
        await self._thread.stop()

    async def _call(self, job: Callable[[], T]) -> T:
        """Run a job on the thread; returns or raises what it does."""
        future: Future[T] = Future()
        self._thread.command(partial(carry_out, job, future))
        return await asyncio.wrap_future(future)

    def _leave_if_joined(self, joined: Future[Peer]) -> None:
        """Runs on the thread, after the attempt to connect."""
        if joined.exception() is None:
            self._thread.disconnect(joined.result())


async def _look_at(future: Future[T]) -> T:
    """Wait for the future. Cancelling this does not cancel the future."""
    ended = asyncio.wrap_future(future)
    ended.add_done_callback(lambda it: it.cancelled() or it.exception())  # marks it as retrieved
    return await asyncio.shield(ended)
