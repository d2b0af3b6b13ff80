"""A puller's way to one life of one exporter, over the best transport that both ends have."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from kv_transfer.transports.interface import Channel, Read, Transport
from pdserve.errors import PeerLost, TransferCancelled, TransferTimeout
from pdserve.protocol import ExporterWelcome, TransportOffer

logger = logging.getLogger(__name__)


class Link:
    """Owns its channel. Ends with `close`, which ends the pulls in flight on it too."""

    def __init__(
        self, welcome: ExporterWelcome, transport: str, reason: str, channel: Channel
    ) -> None:
        self.welcome = welcome
        self.transport = transport  # its name
        self.reason = reason  # why this one
        self._channel = channel
        self._deadlines: set[asyncio.Timeout] = set()  # one for each pull in flight
        self._unused = asyncio.Event()
        self._unused.set()
        self._is_closed = False

    async def read(self, read: Read) -> None:
        """As Channel.read."""
        await self._channel.read(read)

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
        """End the pulls in flight by TransferCancelled, then let go of the channel. Idempotent."""
        self._is_closed = True
        now_s = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(now_s)
        await self._unused.wait()
        await self._channel.close()


async def open_link(
    welcome: ExporterWelcome, host_id: str, transports: Sequence[Transport], timeout_s: float
) -> Link:
    """A link over the first of `transports` (best first) that is seen to work.

    Raises:
        TransferTimeout: none worked, and at least one was still trying at its deadline.
        PeerLost: none worked; with each one's reason.
    """
    reasons: list[str] = []
    usable = _usable(welcome, host_id, transports, reasons)
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    timed_out = False
    for index, (transport, offer) in enumerate(usable):
        # A hung transport may take its share of the time, never the others'.
        left_s = deadline_s - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(left_s / (len(usable) - index)):
                channel = await transport.connect(offer, welcome)
        except PeerLost as error:
            reasons.append(f"{transport.name}: {error}")
        except TimeoutError:
            timed_out = True
            reasons.append(f"{transport.name}: no answer in time")
        else:
            reason = "; ".join(reasons) or "the best transport there is"
            logger.info("pulling from %s by %s (%s)", welcome.node_id, transport.name, reason)
            return Link(welcome, transport.name, reason, channel)
    text = f"no transport to {welcome.node_id!r} within {timeout_s} s: {'; '.join(reasons)}"
    raise TransferTimeout(text) if timed_out else PeerLost(text)


def _usable(
    welcome: ExporterWelcome, host_id: str, transports: Sequence[Transport], reasons: list[str]
) -> list[tuple[Transport, TransportOffer]]:
    """Transports worth trying; appends to `reasons` why the others are not."""
    offers = {offer.name: offer for offer in welcome.offers}
    usable = []
    for transport in transports:
        offer = offers.get(transport.name)
        if offer is None:
            reasons.append(f"{transport.name}: not offered")
        elif transport.needs_same_host and welcome.host_id != host_id:
            reasons.append(f"{transport.name}: another host")
        else:
            usable.append((transport, offer))
    return usable
