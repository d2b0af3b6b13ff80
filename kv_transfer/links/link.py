"""A puller's link to one incarnation of an exporter, over the best transport that both ends have.

A read whose connection breaks is retried once over the same transport, then over the next best one
that works. The link keeps using that one. Each route chooses its codec by what it has measured.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

import msgspec

from kv_transfer.codecs.catalog import codecs_for
from kv_transfer.codecs.choice import RAW_FORM, CodecChoice, Sending
from kv_transfer.codecs.codec import RAW
from kv_transfer.links.in_flight import Pulling, PullsInFlight
from kv_transfer.statistics import PullerStatistics
from kv_transfer.transports.block_read import BlockChannel, BlockRead
from kv_transfer.transports.interface import Channel, Read, Transport
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import (
    AccessDenied,
    CorruptTransfer,
    PeerLost,
    TransferTimeout,
    TransportUnavailable,
)
from pdserve.shared.simulated_link import Carrier, SimulatedLink

log = logging.getLogger(__name__)

_RECONNECT_S = 2.0
_MAX_BREAKS = 2  # of one transport during one read, before the next transport is tried


@dataclass(slots=True, eq=False)
class _Route:
    """A connected transport, and the number of reads that use it."""

    transport: Transport
    channel: Channel
    of_blocks: BlockChannel | None  # the same, if it can read few blocks in a way of its own
    choice: CodecChoice | None  # None: one end has no codec, or the transport needs none
    num_reads: int = 0
    is_closed: bool = False


@dataclass(frozen=True, slots=True)
class _FailedMove:
    """An attempt to change routes that found no working transport."""

    number: int  # counts the link's attempts
    tried: frozenset[str]  # names of the transports
    error: PeerLost | TransferTimeout


class Link:
    """Owns its channels. `close` ends the pulls in flight."""

    def __init__(
        self,
        welcome: ExporterWelcome,
        names: Sequence[str],
        candidates: Sequence[tuple[Transport, TransportOffer]],
        reasons: Mapping[str, str],
        statistics: PullerStatistics,
        simulated: SimulatedLink | None = None,
        reconnect_s: float = _RECONNECT_S,
    ) -> None:
        """Use `open_link`.

        Args:
            welcome: the exporter's.
            names: all transports of this process, best first.
            candidates: the ones worth trying, best first.
            reasons: why the others are not worth trying, by name.
            statistics: for counting retries.
            simulated: the network to simulate, if any.
            reconnect_s: for a new route when one is lost.
        """
        self._reconnect_s = reconnect_s
        self.simulated = simulated
        self._carrier = Carrier(simulated) if simulated is not None else None
        self.welcome = welcome
        self._names = list(names)
        self._candidates = list(candidates)
        self._reasons = dict(reasons)
        self._statistics = statistics
        self._route: _Route | None = None
        self._moving = asyncio.Lock()
        self._num_moves = 0  # attempts to change routes so far
        self._failed: _FailedMove | None = None  # the last one that failed
        self._closing: set[asyncio.Task[None]] = set()  # channels being closed; never cancelled
        self._pulls = PullsInFlight(welcome.node_id, lambda: self.transport)

    @property
    def transport(self) -> str:
        """The name of the transport in use."""
        return self._route.transport.name if self._route else "none"

    @property
    def reason(self) -> str:
        """Why no better transport is used; without a transport, why none."""
        better = takewhile(lambda name: name != self.transport, self._names)
        told = [f"{name}: {self._reasons[name]}" for name in better if name in self._reasons]
        return "; ".join(told) or "the best transport there is"

    @property
    def codec(self) -> str:
        """In which form KV is sent: see `CodecChoice`; without any codec, "raw"."""
        choice = self._route and self._route.choice
        return str(choice) if choice else RAW_FORM

    async def connect(self, timeout_s: float) -> None:
        """Connect the first candidate that works.

        Raises:
            TransferTimeout: none worked, and at least one did not answer in time.
            PeerLost: none worked; with the reason for each.
        """
        await self._take(self._candidates, timeout_s)

    async def read(self, read: Read) -> None:
        """Copy the spans and validate; over another connection or transport if one breaks.

        A broken read may have written to the destination; the retry overwrites it. If all
        transports break, the first error is raised, since the others may be consequences of it.
        """
        route = self._route or await self._move(None, Counter())
        try:
            await self._read_on(route, read)
        except PeerLost as error:
            await self._retry(read, route, error)

    async def read_blocks(self, read: BlockRead) -> None:
        """As `read`, of few blocks, whose sums may have been compared then."""
        route = self._route
        channel = self._way_for(route, read)
        if route is None or channel is None:
            await self.read(read.planned())
            return
        choice = route.choice
        begun = choice.begin() if choice is not None else 0.0
        arrived = 0
        route.num_reads += 1
        try:
            await channel.read_blocks(read)
            arrived = read.num_bytes
        except PeerLost as error:
            broke = error
        else:
            return
        finally:
            self._leave(route)
            if choice is not None:
                choice.note_raw(arrived, choice.seconds_since(begun))
        await self._retry(read.planned(), route, broke)

    def _way_for(self, route: _Route | None, read: BlockRead) -> BlockChannel | None:
        """The channel that reads blocks as they are, without anybody to wait for."""
        if route is None or self._carrier is not None:
            return None
        choice = route.choice
        is_raw = choice is None or choice.is_raw_next(read.num_bytes)
        return route.of_blocks if is_raw else None

    async def _retry(self, read: Read, route: _Route, first: PeerLost) -> None:
        """Read again and again, after `route` broke with the error `first`."""
        breaks: Counter[str] = Counter()
        error = first
        while True:
            self._note_break(route, error)
            breaks[route.transport.name] += 1
            broken = route.transport
            try:
                route = await self._move(route, breaks)
            except (PeerLost, TransferTimeout):
                raise first from None
            if route.transport is broken:
                self._statistics.retried += 1
            else:
                self._statistics.replanned += 1
            try:
                return await self._read_on(route, read)
            except PeerLost as broke:
                error = broke

    def pulling(self, timeout_s: float) -> Pulling:
        """The context of one pull: limits its time, and ends it when the link is closed.

        Raises:
            TransferTimeout, TransferCancelled: as Pulling.
        """
        return Pulling(self._pulls, timeout_s)

    async def close(self) -> None:
        """End the pulls in flight with TransferCancelled, then close the channels. Idempotent."""
        await self._pulls.close()
        route, self._route = self._route, None
        if route is not None:
            self._close_unused(route)
        if self._closing:
            await asyncio.wait(self._closing)

    async def _read_on(self, route: _Route, read: Read) -> None:
        route.num_reads += 1
        try:
            if route.choice is not None:
                await self._read_as_chosen(route.channel, route.choice, read)
            else:
                await self._carried(route.channel, read, None)
        finally:
            self._leave(route)

    def _leave(self, route: _Route) -> None:
        """A read has ended."""
        route.num_reads -= 1
        if route is not self._route:
            self._close_unused(route)

    async def _read_as_chosen(self, channel: Channel, choice: CodecChoice, read: Read) -> None:
        sending = await choice.next(read.num_bytes)
        begun = choice.begin()
        try:
            await self._carried(channel, msgspec.structs.replace(read, sending=sending), sending)
        except CorruptTransfer:
            if sending.codec != RAW:
                choice.drop(sending.codec)  # it is read once more, in another form
            raise
        finally:
            choice.note(sending, choice.seconds_since(begun))
        if sending.codec != RAW:
            self._statistics.coded_bytes += read.num_bytes
            self._statistics.sent_coded += sending.num_bytes

    async def _carried(self, channel: Channel, read: Read, sending: Sending | None) -> None:
        """Read, and wait until the simulated network could have brought it, if there is one."""
        carrier, loop = self._carrier, asyncio.get_running_loop()
        asked_s = loop.time() if carrier is not None else 0.0
        await channel.read(read)
        if carrier is not None:
            num_bytes = read.num_bytes if sending is None else sending.num_bytes
            arrival_s = carrier.arrival_s(num_bytes, asked_s)
            await asyncio.sleep(max(0.0, arrival_s - loop.time()))

    async def _move(self, broken: _Route | None, breaks: Counter[str]) -> _Route:
        """The route to use after `broken`: a new connection, or another transport.

        Raises:
            TransferTimeout, PeerLost: no transport is left, or none works.
        """
        num_before = self._num_moves
        async with self._moving:
            now = self._route
            if now is not None and now is broken:
                self._route = None
                self._close_unused(now)
            elif now is not None and breaks[now.transport.name] < _MAX_BREAKS:
                return now  # another read has changed the route already
            left = [c for c in self._candidates if breaks[c[0].name] < _MAX_BREAKS]
            names = frozenset(transport.name for transport, _ in left)
            failed = self._failed
            if failed is not None and failed.number > num_before and names <= failed.tried:
                # Another read has tried the same since our break, in vain. If each read tried
                # again, one after the other, each would wait as long.
                raise type(failed.error)(failed.error.message)
            if broken is not None:
                left.sort(key=lambda candidate: candidate[0] is not broken.transport)
            self._num_moves += 1
            try:
                return await self._take(left, self._reconnect_s)
            except (PeerLost, TransferTimeout) as error:
                self._failed = _FailedMove(self._num_moves, names, error)
                raise

    async def _take(
        self, candidates: Sequence[tuple[Transport, TransportOffer]], timeout_s: float
    ) -> _Route:
        """Change to the first of them that works; reads over the former route may finish."""
        route = await self._first_of(candidates, timeout_s)
        former, self._route = self._route, route
        if former is not None:
            self._close_unused(former)
        log.info("pulling from %s by %s (%s)", self.welcome.node_id, self.transport, self.reason)
        return route

    def _close_unused(self, route: _Route) -> None:
        """Close a former route once no read uses it; the last read calls this too."""
        if route.num_reads or route.is_closed:
            return
        route.is_closed = True
        task = asyncio.get_running_loop().create_task(route.channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _note_break(self, route: _Route, error: PeerLost) -> None:
        log.info("%s to %s broke: %s", route.transport.name, self.welcome.node_id, error)
        self._reasons[route.transport.name] = f"broke: {error}"

    async def _first_of(
        self, candidates: Sequence[tuple[Transport, TransportOffer]], timeout_s: float
    ) -> _Route:
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        timed_out = False
        for index, (transport, offer) in enumerate(candidates):
            # A transport that hangs uses up its share of the time only.
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
                codecs = codecs_for(self.welcome.layout)
                usable = {name: codecs[name] for name in offer.codecs if name in codecs}
                if self.simulated is not None and self.simulated.is_raw:
                    usable = {}
                of_blocks = channel if isinstance(channel, BlockChannel) else None
                choice = CodecChoice(usable) if usable else None
                return _Route(transport, channel, of_blocks, choice)
        text = f"no transport to {self.welcome.node_id!r} within {timeout_s} s: {self.reason}"
        raise TransferTimeout(text) if timed_out else PeerLost(text)


async def open_link(
    welcome: ExporterWelcome,
    transports: Sequence[Transport],
    timeout_s: float,
    statistics: PullerStatistics,
    simulated: SimulatedLink | None = None,
    reconnect_s: float = _RECONNECT_S,
) -> Link:
    """A link over the first of `transports` (best first) that works.

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
    link = Link(welcome, names, candidates, reasons, statistics, simulated, reconnect_s)
    await link.connect(timeout_s)
    return link
