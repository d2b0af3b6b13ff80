"""A puller's link to an exporter, where at least one of the two has a pool in several parts.

Each part of the puller's pool takes its layers and heads from as few parts of the exporter's as
have them, over a link to each. A session, its tickets and its pulls are those of the whole nodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final, TypeAlias

from msgspec.structs import replace

from kv_transfer.hosts.far_host import FarHost, FarLink
from kv_transfer.links.in_flight import Pulling, PullsInFlight
from kv_transfer.links.link import Link, open_link
from kv_transfer.sharded_pool import MAX_RANKS, part_number
from kv_transfer.spans.box import choose_shards, common_layers
from kv_transfer.statistics import PullerStatistics
from kv_transfer.transports.interface import Transport
from pdserve.kv import KvLayout
from pdserve.protocol import ExporterWelcome, TransportOffer
from pdserve.shared.errors import PeerLost
from pdserve.shared.simulated_link import SimulatedLink

MAX_STAGES: Final = 64  # of an exporter's node


@dataclass(frozen=True, slots=True)
class Strand:
    """What one part of our pool takes from one part of the exporter's."""

    part: int  # of our pool
    heads: range  # of the model
    layers: range  # likewise
    link: Link  # its welcome is that of the exporter's part


@dataclass(frozen=True, slots=True)
class OwnPart:
    """One part of the puller's pool, as links to it need it."""

    number: int
    layout: KvLayout
    transports: Sequence[Transport]  # best first


class ShardedLink:
    """Owns its strands' links. `close` ends the pulls in flight. Elsewhere used like a Link."""

    def __init__(
        self, welcome: ExporterWelcome, strands: Sequence[Strand], far: Sequence[FarLink] = ()
    ) -> None:
        """Use `open_sharded_link`."""
        self.welcome = welcome
        self.strands = strands
        self.far = far  # of our parts on other hosts
        self._pulls = PullsInFlight(welcome.node_id, lambda: self.transport)

    @property
    def transport(self) -> str:
        """The name of the transport in use; of several, joined."""
        names = {strand.link.transport for strand in self.strands}
        names.update(name for link in self.far for name in link.transport.split("+"))
        return "+".join(sorted(names))

    @property
    def reason(self) -> str:
        """Why the first strand uses no better transport; without one, why none."""
        return self.strands[0].link.reason

    @property
    def codec(self) -> str:
        """In which forms the strands' KV is sent."""
        return ", ".join(sorted({strand.link.codec for strand in self.strands}))

    @property
    def simulated(self) -> SimulatedLink | None:
        """The simulated network of each strand, if any."""
        return self.strands[0].link.simulated

    def pulling(self, timeout_s: float) -> Pulling:
        """The context of one pull: limits its time, and ends it when the link is closed."""
        return Pulling(self._pulls, timeout_s)

    async def close(self) -> None:
        """Close all strands."""
        await self._pulls.close()
        async with AsyncExitStack() as closing:  # closes all, even if one fails
            for far in self.far:
                closing.push_async_callback(far.close)
            for strand in self.strands:
                closing.push_async_callback(strand.link.close)


AnyLink: TypeAlias = Link | ShardedLink


def part_welcomes(welcome: ExporterWelcome) -> list[ExporterWelcome]:
    """Return the welcome of each part of the exporter's pool; of most there is one, the whole.

    Raises:
        PeerLost: its offers are of no such parts.
        LayoutMismatch: its heads or layers cannot be divided so.
    """
    parts = sorted({offer.part for offer in welcome.offers}) or [0]
    num_parts, num_stages = len(parts), parts[-1] // MAX_RANKS + 1
    is_even = 0 < num_stages <= MAX_STAGES and num_parts % num_stages == 0
    if not is_even or parts != [part_number(n, num_parts, num_stages) for n in range(num_parts)]:
        raise PeerLost(f"{welcome.node_id!r} offers parts {parts[:3]} ... of its KV")
    if num_parts == 1:
        return [welcome]
    layouts = welcome.layout.parts(num_parts // num_stages, num_stages)
    return [
        _part_welcome(welcome, layout, [offer for offer in welcome.offers if offer.part == part])
        for part, layout in zip(parts, layouts, strict=True)
    ]


def _part_welcome(
    welcome: ExporterWelcome, layout: KvLayout, offers: list[TransportOffer]
) -> ExporterWelcome:
    host_id = offers[0].host_id or welcome.host_id  # it may be on another host of the node
    return replace(welcome, layout=layout, offers=offers, host_id=host_id)


async def open_sharded_link(
    welcome: ExporterWelcome,
    theirs: Sequence[ExporterWelcome],
    own: Sequence[OwnPart],
    timeout_s: float,
    statistics: PullerStatistics,
    simulated: SimulatedLink | None = None,
    hosts: Sequence[FarHost] = (),
) -> ShardedLink:
    """A link between all parts that have heads of the same layers in common.

    Args:
        welcome: the exporter's.
        theirs: the same of its parts.
        own: our parts on this host.
        timeout_s: for all of them.
        statistics: as Link.
        simulated: as Link.
        hosts: that have our other parts.

    Raises:
        TransferTimeout, PeerLost, LayoutMismatch: as Puller.connect.
    """
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    layouts = [part.layout for part in theirs]
    strands: list[Strand] = []
    async with AsyncExitStack() as undo:
        for part in own:
            for index, heads in choose_shards(layouts, part.layout, part.number):
                left_s = max(0.0, end_s - loop.time())
                link = await open_link(
                    theirs[index], part.transports, left_s, statistics, simulated
                )
                undo.push_async_callback(link.close)
                layers = common_layers(layouts[index], part.layout)
                strands.append(Strand(part.number, heads, layers, link))
        far: list[FarLink] = []
        for host in hosts:
            far.append(await host.connect(welcome, max(0.0, end_s - loop.time())))
            undo.push_async_callback(far[-1].close)
        undo.pop_all()
    return ShardedLink(welcome, strands, far)
