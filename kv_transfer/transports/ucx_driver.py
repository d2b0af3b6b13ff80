"""The thread that owns a puller's UCX agent, and how the event loop waits for its transfers.

A posted transfer cannot be stopped. So a transfer is posted in slices of a few milliseconds;
cancelling it posts no further slice and waits for those in flight. If one of these never ends,
because the exporter hangs in the middle of it, the agent is destroyed: nothing else is known to
stop UCX from writing. The next connection then creates a new agent.

The thread sleeps while nothing is in flight. Otherwise it polls, since UCX makes no progress
without being polled.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kv_transfer.lone_thread import carry_out
from kv_transfer.plan import Spans
from kv_transfer.transports.ucx_agent import Agent, NothingPosted, Region
from kv_transfer.transports.ucx_transfer import Peer, Transfer, cut_slices
from pdserve.errors import PeerLost, TransportUnavailable

T = TypeVar("T")

log = logging.getLogger(__name__)

_SLICES_AHEAD = 2  # one is copied while the next one is posted
_PAD_ENTRIES = 4096
_BUSY_POLLS = 200  # polls without progress before the thread sleeps between polls
_POLL_S = 0.0005
QUARANTINE_S = 2.0  # time for an abandoned transfer to end by itself


class UcxDriver:
    """Owns the thread, and in it the agent, which is created for the first peer."""

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        region: Region,
        *,
        quarantine_s: float = QUARANTINE_S,
    ) -> None:
        """Args:
        make_agent: called on the thread; `connect` raises what it raises.
        region: the memory that is pulled into.
        quarantine_s: time after which the agent of an abandoned transfer is destroyed.
        """
        self._make_agent = make_agent
        self._quarantine_s = quarantine_s
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pads: deque[NDArray[np.uint64]] = deque()  # registered and unused
        # The rest belongs to the thread.
        self._regions: list[tuple[Region, object]] = [(region, None)]  # with what keeps it alive
        self._agent: Agent | None = None
        self._epoch = 0  # how many agents have been destroyed
        self._peers: dict[str, int] = {}  # name |-> number of channels that use it
        self._active: list[Transfer] = []
        self._stopped: Future[None] | None = None  # set once the thread is to end

    async def connect(self, name: str, metadata: bytes) -> Peer:
        """Add a peer; called once for each channel.

        Raises:
            PeerLost: it cannot be reached, or has another name.
            TransportUnavailable: this process cannot use UCX.
        """
        joined: Future[Peer] = Future()
        self._command(partial(carry_out, partial(self._connect, name, metadata), joined))
        try:
            return await _look_at(joined)
        except asyncio.CancelledError:
            self._command(partial(self._leave_if_joined, joined))
            raise

    async def disconnect(self, peer: Peer) -> None:
        """Remove a channel; with the last one the peer is removed."""
        await self._call(partial(self._disconnect, peer))

    async def transfer(self, peer: Peer, source: Region, destination: Region, spans: Spans) -> None:
        """Copy spans of a peer's region to one of ours.

        Once it has returned or raised, also by cancellation, nothing writes to the destination.

        Raises:
            PeerLost: the peer is gone, or the agent had to be destroyed.
        """
        transfer = Transfer(peer, source, destination)
        self._command(partial(self._begin, transfer, spans))
        try:
            await _look_at(transfer.ended)
        except asyncio.CancelledError:
            self._command(partial(self._abandon, transfer))
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
                await self._call(partial(self._register, pad))
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
        thread, self._thread = self._thread, None
        if thread is not None:
            stopped: Future[None] = Future()
            self._commands.put(partial(self._stop, stopped))
            await asyncio.wrap_future(stopped)
            thread.join()  # it has nothing left to do

    async def _call(self, job: Callable[[], T]) -> T:
        """Run a job on the thread; returns or raises what it does."""
        future: Future[T] = Future()
        self._command(partial(carry_out, job, future))
        return await asyncio.wrap_future(future)

    def _command(self, command: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-ucx", daemon=True)
            self._thread.start()
        self._commands.put(command)

    # ---- from here on: runs on the thread ------------------------------------------------------

    def _run(self) -> None:
        idle_polls = 0
        while self._stopped is None:
            timeout_s = None
            if self._active:
                timeout_s = 0.0 if idle_polls < _BUSY_POLLS else _POLL_S
            commanded = self._obey(timeout_s)
            if self._advance_all() or commanded:
                idle_polls = 0
            else:
                idle_polls += 1
            self._end_quarantine()
        stopped, self._stopped = self._stopped, None
        self._destroy_agent("the puller is closing")
        stopped.set_result(None)

    def _obey(self, timeout_s: float | None) -> bool:
        """Wait for a command and execute it; whether there was one."""
        try:
            command = self._commands.get(block=timeout_s != 0.0, timeout=timeout_s)
        except queue.Empty:
            return False
        try:
            command()
        except Exception as error:  # noqa: BLE001 - the thread must survive: others wait for it
            failure = _describe(error)
        else:
            return True
        self._destroy_agent(failure)
        return True

    def _stop(self, stopped: Future[None]) -> None:
        self._stopped = stopped

    def _connect(self, name: str, metadata: bytes) -> Peer:
        agent = self._agent
        if agent is None:
            agent = self._make_agent()
            for region, _ in self._regions:
                agent.register(region)
            self._agent = agent
        if name not in self._peers:
            found = agent.add_peer(metadata)
            if found != name:
                agent.remove_peer(found)
                raise PeerLost(f"the UCX metadata is of {found!r}, not of {name!r}")
            self._peers[name] = 0
        self._peers[name] += 1
        return Peer(name, self._epoch)

    def _disconnect(self, peer: Peer) -> None:
        if peer.epoch != self._epoch:
            return  # it was forgotten together with an earlier agent
        self._peers[peer.name] -= 1
        if self._peers[peer.name] == 0:
            del self._peers[peer.name]
            if self._agent is not None:
                self._agent.remove_peer(peer.name)

    def _leave_if_joined(self, joined: Future[Peer]) -> None:
        if joined.exception() is None:
            self._disconnect(joined.result())

    def _register(self, pad: NDArray[np.uint64]) -> None:
        region = Region.of(pad)
        if self._agent is not None:
            self._agent.register(region)
        # With the array, to keep it alive: the caller may have been cancelled meanwhile.
        self._regions.append((region, pad))

    def _begin(self, transfer: Transfer, spans: Spans) -> None:
        self._active.append(transfer)
        if transfer.peer.epoch != self._epoch:
            transfer.error = PeerLost(f"UCX is not connected to {transfer.peer.name!r} any more")
            return
        try:
            transfer.slices.extend(cut_slices(spans))  # on this thread: slow for many spans
        except Exception as error:  # noqa: BLE001 - passed on to the waiting side
            transfer.error = PeerLost(_describe(error))

    def _abandon(self, transfer: Transfer) -> None:
        transfer.slices.clear()
        transfer.abandoned_s = transfer.abandoned_s or time.monotonic()

    def _advance_all(self) -> bool:
        """Advance every transfer; whether anything changed."""
        moved = False
        for transfer in list(self._active):
            if transfer.ended.done():
                continue  # it ended when another transfer had the agent destroyed
            moved |= self._advance(transfer)
            if transfer.is_over and not transfer.ended.done():
                self._active.remove(transfer)
                transfer.end()
                moved = True
        return moved

    def _advance(self, transfer: Transfer) -> bool:
        agent = self._agent
        if agent is None or transfer.is_over:
            return False
        try:
            if transfer.posted and transfer.poll(agent):
                return True
            if transfer.slices and len(transfer.posted) < _SLICES_AHEAD:
                transfer.post(agent)
                return True
            return False
        except NothingPosted as error:
            failure, may_write = error.message, False
        except PeerLost as error:
            # NIXL forgets the descriptors of a failed read, but hardware may still be writing.
            failure, may_write = error.message, agent.has_late_writes
        except Exception as error:  # noqa: BLE001 - passed on to the waiting side
            failure, may_write = _describe(error), True
        # Outside of `except`, so that no traceback keeps a handle, and thus NIXL's agent, alive.
        transfer.error = transfer.error or PeerLost(failure)
        self._abandon(transfer)  # its other slices in flight have some time to end by themselves
        if may_write:
            self._destroy_agent(f"a transfer from {transfer.peer.name!r} failed: {failure}")
        return True

    def _end_quarantine(self) -> None:
        latest_s = time.monotonic() - self._quarantine_s
        for transfer in self._active:
            if transfer.abandoned_s is not None and transfer.abandoned_s < latest_s:
                self._destroy_agent(f"a transfer from {transfer.peer.name!r} did not end")
                return

    def _destroy_agent(self, reason: str) -> None:
        """The last resort: ends all transfers in flight with PeerLost."""
        agent, self._agent = self._agent, None
        transfers, self._active = self._active, []
        self._peers.clear()
        self._epoch += 1
        for transfer in transfers:
            transfer.slices.clear()
            transfer.posted.clear()  # handles keep the agent alive
        if agent is not None:
            agent.destroy()
            del agent
            gc.collect()
        if transfers:
            log.warning("the UCX agent was destroyed: %s", reason)
        for transfer in transfers:
            transfer.error = transfer.error or PeerLost(f"the UCX agent was destroyed: {reason}")
            transfer.end()


async def _look_at(future: Future[T]) -> T:
    """Wait for the future. Cancelling this does not cancel the future."""
    ended = asyncio.wrap_future(future)
    ended.add_done_callback(lambda it: it.cancelled() or it.exception())  # marks it as retrieved
    return await asyncio.shield(ended)


def _describe(error: Exception) -> str:
    """Log an unexpected error with its traceback, and return its text (see `_advance`)."""
    log.error("unexpected on the UCX thread:\n%s", traceback.format_exc())
    return f"unexpected: {error!r}"
