"""The thread that owns a puller's UCX agent, and in it all transfers in flight.

If a slice in flight of an abandoned transfer never ends, because the exporter hangs in the middle
of it, the agent is destroyed: nothing else is known to stop UCX from writing. The next connection
then creates a new agent.

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
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer.spans.plan import Spans
from kv_transfer.transports.ucx.agent import NothingPosted, UcxAgent, UcxRegion
from kv_transfer.transports.ucx.transfer import Peer, Transfer, cut_slices
from pdserve.shared.errors import PeerLost

log = logging.getLogger(__name__)

_SLICES_AHEAD = 2  # one is copied while the next one is posted
_BUSY_POLLS = 200  # polls without progress before the thread sleeps between polls
_POLL_S = 0.0005
QUARANTINE_S = 2.0  # time for an abandoned transfer to end by itself


class UcxThread:
    """Executes commands, and advances transfers; the agent is created for the first peer."""

    def __init__(
        self, make_agent: Callable[[], UcxAgent], region: UcxRegion, quarantine_s: float
    ) -> None:
        self._make_agent = make_agent
        self._quarantine_s = quarantine_s
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        # The rest belongs to the thread.
        self._regions: list[tuple[UcxRegion, object]] = [(region, None)]  # with what keeps it alive
        self._agent: UcxAgent | None = None
        self._epoch = 0  # how many agents have been destroyed
        self._peers: dict[str, int] = {}  # name |-> number of channels that use it
        self._active: list[Transfer] = []
        self._stopped: Future[None] | None = None  # set once the thread is to end

    def command(self, command: Callable[[], None]) -> None:
        """Have the thread execute a command; the first one starts it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="kv-ucx", daemon=True)
            self._thread.start()
        self._commands.put(command)

    async def stop(self) -> None:
        """Destroy the agent and end the thread; no transfer is in flight. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            stopped: Future[None] = Future()
            self._commands.put(partial(self._stop, stopped))
            await asyncio.wrap_future(stopped)
            thread.join()  # it has nothing left to do

    # ---- commands, and the rest: on the thread -------------------------------------------------

    def connect(self, name: str, metadata: bytes) -> Peer:
        """Add a peer; called once for each channel."""
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

    def disconnect(self, peer: Peer) -> None:
        """Remove a channel; with the last one the peer is removed."""
        if peer.epoch != self._epoch:
            return  # it was forgotten together with an earlier agent
        self._peers[peer.name] -= 1
        if self._peers[peer.name] == 0:
            del self._peers[peer.name]
            if self._agent is not None:
                self._agent.remove_peer(peer.name)

    def register(self, pad: NDArray[np.uint64]) -> None:
        """Register memory with this agent and later ones. Raises TransportUnavailable."""
        region = UcxRegion.of(pad)
        if self._agent is not None:
            self._agent.register(region)
        # With the array, to keep it alive: the caller may have been cancelled meanwhile.
        self._regions.append((region, pad))

    def begin(self, transfer: Transfer, spans: Spans) -> None:
        """Cut a transfer into slices, which are posted and waited for from now on."""
        self._active.append(transfer)
        if transfer.peer.epoch != self._epoch:
            transfer.error = PeerLost(f"UCX is not connected to {transfer.peer.name!r} any more")
            return
        try:
            transfer.slices.extend(cut_slices(spans))  # on this thread: slow for many spans
        except Exception as error:  # noqa: BLE001 - passed on to the waiting side
            transfer.error = PeerLost(_describe(error))

    def abandon(self, transfer: Transfer) -> None:
        """Post no further slice; those in flight have some time to end by themselves."""
        transfer.slices.clear()
        transfer.abandoned_s = transfer.abandoned_s or time.monotonic()

    # ---- the loop ------------------------------------------------------------------------------

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
        self.abandon(transfer)
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


def _describe(error: Exception) -> str:
    """Log an unexpected error with its traceback, and return its text (see `_advance`)."""
    log.error("unexpected on the UCX thread:\n%s", traceback.format_exc())
    return f"unexpected: {error!r}"
