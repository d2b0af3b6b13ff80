"""A puller's way to one life of one exporter, over the best transport that both ends have.

A read whose connection breaks is tried once more over the same transport, then over the next best
one that works, where the link then stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import takewhile

from kv_transfer.statistics import PullerStatistics
from kv_transfer.transports.interface import Channel, Read, Transport
from pdserve.errors import (
    AccessDenied,
    PeerLost,
    TransferCancelled,
    TransferTimeout,
    TransportUnavailable,
)
from pdserve.protocol import ExporterWelcome, TransportOffer

logger = logging.getLogger(__name__)

_RECONNECT_S = 2.0
_MAX_BREAKS = 2  # of one transport during one read, before the next one is taken


@dataclass(slots=True, eq=False)
class _Road:
    """A transport that has been connected, and how many reads use it."""

    transport: Transport
    channel: Channel
    num_reads: int = 0
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class _FailedMove:
    """One that found nothing that works."""

    number: int  # of the link's moves, counted when they begin
    tried: frozenset[str]  # names of transports
    error: PeerLost | TransferTimeout


class Link:
    """Owns its channels. Ends with `close`, which ends the pulls in flight on it too."""

    def __init__(
        self,
        welcome: ExporterWelcome,
        names: Sequence[str],
        candidates: Sequence[tuple[Transport, TransportOffer]],
        reasons: Mapping[str, str],
        statistics: PullerStatistics,
    ) -> None:
        """Use `open_link`.

        Args:
            welcome: of the exporter.
            names: of all transports that we have, best first.
            candidates: those worth trying, best first.
            reasons: why the others are not among them, by name.
            statistics: where retries are counted.
        """
        self.welcome = welcome
        self._names = list(names)
        self._candidates = list(candidates)
        self._reasons = dict(reasons)
        self._statistics = statistics
        self._road: _Road | None = None
        self._moving = asyncio.Lock()
        self._num_moves = 0  # that have begun
        self._failed: _FailedMove | None = None  # the latest of those
        self._closing: set[asyncio.Task[None]] = set()  # of channels; no cancellation reaches them
        self._deadlines: set[asyncio.Timeout] = set()  # one for each pull in flight
        self._unused = asyncio.Event()
        self._unused.set()
        self._is_closed = False

    @property
    def transport(self) -> str:
        """The name of the transport in use."""
        return self._road.transport.name if self._road else "none"

    @property
    def reason(self) -> str:
        """Why this transport and no better one; without one, why none."""
        better = takewhile(lambda name: name != self.transport, self._names)
        told = [f"{name}: {self._reasons[name]}" for name in better if name in self._reasons]
        return "; ".join(told) or "the best transport there is"

    async def connect(self, timeout_s: float) -> None:
        """Take the first candidate that is seen to work.

        Raises:
            TransferTimeout: none worked, and at least one was still trying at its deadline.
            PeerLost: none worked; with each one's reason.
        """
        await self._take(self._candidates, timeout_s)

    async def read(self, read: Read) -> None:
        """As Channel.read, over another connection or transport where one breaks.

        A read that broke may have written to the destination; the last one overwrites that. When
        every transport broke, the first error is raised: the others may only follow from it.
        """
        breaks: Counter[str] = Counter()
        first: PeerLost | None = None
        road = self._road or await self._move(None, breaks)
        while True:
            try:
                return await self._read_on(road, read)
            except PeerLost as error:
                first = first or error
                self._note_break(road, error)
                breaks[road.transport.name] += 1
            broken = road.transport
            try:
                road = await self._move(road, breaks)
            except (PeerLost, TransferTimeout):
                raise first from None
            if road.transport is broken:
                self._statistics.retried += 1
            else:
                self._statistics.replanned += 1

    @asynccontextmanager
    async def pulling(self, timeout_s: float) -> AsyncIterator[None]:
        """Bounds one pull.

        Raises:
            TransferTimeout: the body took longer than `timeout_s`.
            TransferCancelled: the link was closed, before or meanwhile.
        """
        if self._is_closed:
            raise TransferCancelled(f"the link to {self.welcome.node_id!r} is closed")
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                self._deadlines.add(deadline)
                self._unused.clear()
                try:
                    yield
                finally:
                    self._deadlines.discard(deadline)
                    if not self._deadlines:
                        self._unused.set()
        except TimeoutError as error:
            if self._is_closed:
                raise TransferCancelled(
                    f"the link to {self.welcome.node_id!r} was closed during the pull"
                ) from error
            raise TransferTimeout(
                f"the pull from {self.welcome.node_id!r} over {self.transport} took longer than "
                f"{timeout_s} s"
            ) from error

    async def close(self) -> None:
        """End the pulls in flight by TransferCancelled, then let go of the channels. Idempotent."""
        self._is_closed = True
        now_s = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now_s)
        await self._unused.wait()
        road, self._road = self._road, None
        if road is not None:
            self._close_unused(road)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _read_on(self, road: _Road, read: Read) -> None:
        road.num_reads += 1
        try:
            await road.channel.read(read)
        finally:
            road.num_reads -= 1
            if road is not self._road:
                self._close_unused(road)

    async def _move(self, broken: _Road | None, breaks: Counter[str]) -> _Road:
        """Where to read on after `broken`: a new connection, or another transport.

        Raises:
            TransferTimeout, PeerLost: nowhere; none is left, or works.
        """
        num_before = self._num_moves
        async with self._moving:
            now = self._road
            if now is not None and now is broken:
                self._road = None
                self._close_unused(now)
            elif now is not None and breaks[now.transport.name] < _MAX_BREAKS:
                return now  # somebody else's read has moved on already
            left = [c for c in self._candidates if breaks[c[0].name] < _MAX_BREAKS]
            names = frozenset(transport.name for transport, _ in left)
            failed = self._failed
            if failed is not None and failed.number > num_before and names <= failed.tried:
                # Begun after our break, in vain: to try the same again, one read after the other,
                # would cost each of them as long.
                raise type(failed.error)(failed.error.message)
            if broken is not None:
                left.sort(key=lambda candidate: candidate[0] is not broken.transport)
            self._num_moves += 1
            try:
                return await self._take(left, _RECONNECT_S)
            except (PeerLost, TransferTimeout) as error:
                self._failed = _FailedMove(self._num_moves, names, error)
                raise

    async def _take(
        self, candidates: Sequence[tuple[Transport, TransportOffer]], timeout_s: float
    ) -> _Road:
        """Go on over the first of them that works; reads over another one come to their end."""
        road = await self._first_of(candidates, timeout_s)
        former, self._road = self._road, road
        if former is not None:
            self._close_unused(former)
        logger.info("pulling from %s by %s (%s)", self.welcome.node_id, self.transport, self.reason)
        return road

    def _close_unused(self, road: _Road) -> None:
        """Close a road that is not in use any more; the last read on it comes here as well."""
        if road.num_reads or road.is_closed:
            return
        road.is_closed = True
        task = asyncio.get_running_loop().create_task(road.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _note_break(self, road: _Road, error: PeerLost) -> None:
        logger.info("%s to %s broke: %s", road.transport.name, self.welcome.node_id, error)
        self._reasons[road.transport.name] = f"broke: {error}"

    async def _first_of(
        self, candidates: Sequence[tuple[Transport, TransportOffer]], timeout_s: float
    ) -> _Road:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        timed_out = False
        for index, (transport, offer) in enumerate(candidates):
            # A hung transport may take its share of the time, never the others'.
            share_s = (deadline_s - loop.time()) / (len(candidates) - index)
            try:
                async with asyncio.timeout(share_s):
                    channel = await transport.connect(offer, self.welcome)
            except (PeerLost, AccessDenied, TransportUnavailable) as error:
                self._reasons[transport.name] = str(error)
            except TimeoutError:
                timed_out = True
                self._reasons[transport.name] = "no answer in time"
            else:
                return _Road(transport, channel)
        text = f"no transport to {self.welcome.node_id!r} within {timeout_s} s: {self.reason}"
        raise TransferTimeout(text) if timed_out else PeerLost(text)


async def open_link(
    welcome: ExporterWelcome,
    transports: Sequence[Transport],
    timeout_s: float,
    statistics: PullerStatistics,
) -> Link:
    """A link over the first of `transports` (best first) that is seen to work.

    Raises:
        TransferTimeout, PeerLost: as Link.connect.
    """
    offers = {offer.name: offer for offer in welcome.offers}
    candidates, reasons = [], {}
    for transport in transports:
        offer = offers.get(transport.name)
        if offer is None:
            reasons[transport.name] = "not offered"
        elif offer.unavailable:
            reasons[transport.name] = f"{welcome.node_id} cannot: {offer.unavailable}"
        elif obstacle := transport.obstacle(offer, welcome):
            reasons[transport.name] = obstacle
        else:
            candidates.append((transport, offer))
    names = [transport.name for transport in transports]
    link = Link(welcome, names, candidates, reasons, statistics)
    await link.connect(timeout_s)
    return link
