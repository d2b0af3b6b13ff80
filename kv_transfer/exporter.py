"""The side that has the blocks: issues tickets for them, and serves its pool to pullers.

The life of a ticket: `issue` seals the current generations of the blocks into it. A puller presents
it (two-sided transports) or just reads the blocks (one-sided). When the blocks are reused,
`pool.bump` makes it stale. Nothing here keeps blocks from being reused: the node holds references.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from kv_transfer.checksum import Sums, block_sums, layer_groups
from kv_transfer.handshake import AccessTokens, KvIdentity
from kv_transfer.host import host_id
from kv_transfer.hosts.far_host import FarHost
from kv_transfer.memory import ExportedPool, KvPool
from kv_transfer.sharded_pool import part_number, parts_here, parts_of
from kv_transfer.spans.box import BlockRun, whole_box
from kv_transfer.spans.layer_pieces import part_of, pieces
from kv_transfer.statistics import ExporterStatistics
from kv_transfer.ticket import Ticket, TicketSealer, max_blocks
from kv_transfer.transports.catalog import KINDS, PORTS_OF_A_PART, TransportKind
from kv_transfer.transports.interface import Source, TransportServer
from kv_transfer.transports.tls import NodeTls
from pdserve.kv import KvLayout, need
from pdserve.kv.companions import NONE, Companions
from pdserve.protocol import ExporterWelcome, PullerHello, TransportOffer, TransportReach
from pdserve.protocol.version import PROTOCOL, check_protocol
from pdserve.shared.clock import Clock
from pdserve.shared.errors import (
    AccessDenied,
    ConfigError,
    LayoutMismatch,
    PeerLost,
    StaleIncarnation,
    TransportUnavailable,
)
from pdserve.shared.introduction import is_introduced, new_key

log = logging.getLogger(__name__)

MAX_PORT = 65535


@dataclass(frozen=True, slots=True)
class TicketRules:
    """What tickets are like."""

    lifetime_s: float = 60.0
    with_checksums: bool = True  # of pools in CPU memory


@dataclass(frozen=True, slots=True)
class SpreadPool:
    """Of a pool in parts: those on other hosts, or what such a host shares with its node."""

    hosts: Sequence[FarHost] = ()  # that have other parts
    ticket_key: bytes = b""  # on such a host: the node's
    on_ticket: Callable[[Ticket], None] = lambda _: None  # there: given each that a puller shows


class PartSource:
    """One part of an exporter's pool. Implements Source."""

    def __init__(self, exporter: Exporter, number: int, pool: KvPool, layout: KvLayout) -> None:
        self.name = f"{exporter.name}/{number}"
        self.layout = layout
        self.pool = pool
        self.statistics = exporter.statistics
        self.tls = exporter.tls
        self._exporter = exporter

    def check_access(self, token: bytes) -> None:
        """Check that a connection has an open session's token, which is for all parts."""
        self._exporter.check_access(token)

    def has_access(self, token: bytes) -> bool:
        """Whether a connection's session is still open."""
        return self._exporter.has_access(token)

    def open_ticket(self, sealed: bytes) -> Ticket:
        """Verify a ticket, which is for the heads of all parts."""
        return self._exporter.open_ticket(sealed)


class Exporter:
    """The exported pool of one incarnation of a node. Uses the pool, owns the servers.

    A pool of several parts has servers for each that is on this host. Otherwise the exporter is its
    own Source.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        identity: KvIdentity,
        pool: KvPool,
        clock: Clock,
        kinds: Sequence[TransportKind] = KINDS,
        *,
        tickets: TicketRules = TicketRules(),
        tls: NodeTls | None = None,
        spread: SpreadPool = SpreadPool(),
        companions: Companions | None = None,
    ) -> None:
        """An exporter that does not serve yet.

        Args:
            node_id, incarnation: of the node.
            identity: what its KV is of.
            pool: which outlives this.
            clock: of tickets.
            kinds: of transports, best first.
            tickets: what they are like.
            tls: how connections are secured.
            spread: if the pool has parts on several hosts.
            companions: of the pool's blocks, at any time.
        """
        pools = parts_of(pool)
        layouts = identity.check_pools(pools)
        self.node_id = node_id
        self.incarnation = incarnation
        self.identity = identity
        self.pool = pool
        self.statistics = ExporterStatistics()
        self.tls = tls
        self.introduction_key = new_key()  # for coordinators only
        self.offers: list[TransportOffer] = []
        self._clock = clock
        self._kinds = kinds
        self._tickets = tickets
        self._groups = layer_groups(identity.windows, identity.layout.total_layers)
        self._sealer = TicketSealer(incarnation, clock, spread.ticket_key)
        self._spread = spread
        self._companions = companions
        self._servers: list[TransportServer] = []
        self._num_parts = len(pools)
        self._sources: dict[int, Source] = {0: self}  # of the parts of the pool that are here
        if len(pools) > 1:
            here = parts_here(pool).items()
            self._sources = {n: PartSource(self, n, part, layouts[n]) for n, part in here}
        self._access = AccessTokens()
        self._host_id = host_id()

    @property
    def name(self) -> str:
        """Unique to this incarnation of the exporter."""
        return f"{self.node_id}@{self.incarnation}"

    @property
    def layout(self) -> KvLayout:
        """The layout of the exported pool."""
        return self.identity.layout

    @property
    def ticket_key(self) -> bytes:
        """What tickets are sealed with: for other hosts of this node only."""
        return self._sealer.key

    @property
    def reaches(self) -> list[TransportReach]:
        """Which nodes each available transport reaches, best first. Call after `start`."""
        lacking = {offer.name for offer in self.offers if offer.unavailable}
        available = {offer.name for offer in self.offers} - lacking
        return [
            TransportReach(name=kind.name, domain=kind.domain(self.pool))
            for kind in self._kinds
            if kind.name in available
        ]

    @property
    def max_ticket_blocks(self) -> int:
        """The most blocks of one ticket; more KV takes several tickets."""
        num_sums = len(self.layout.heads) * (max(self._groups) + 1)
        return self.layout.whole_blocks(max_blocks(num_sums if self._has_checksums else 0))

    @property
    def _has_checksums(self) -> bool:
        return self._tickets.with_checksums and isinstance(self.pool, ExportedPool)

    async def start(self, host: str, advertised_host: str = "", port: int = 0) -> None:
        """Start all servers on `host`, which peers reach as `advertised_host` (default: the same).

        The first TCP port is `port`, each kind of transport has its own from there on, and so has
        each part of the pool after it; for port 0 all are any free ones.

        The offer of a transport that this process cannot serve has a reason instead of an address.
        If this raises, also by cancellation, nothing is left running.

        Raises:
            OSError: the address cannot be bound.
        """
        last_port = port + self._num_parts * PORTS_OF_A_PART - 1
        if port and last_port > MAX_PORT:
            raise OSError(f"ports {port} to {last_port} are for KV, and the last one is {MAX_PORT}")
        try:
            num_parts = self._num_parts
            num_stages = min(num_parts, self.identity.num_stages)  # private pools have one part
            for index, source in self._sources.items():
                first_port = port and port + index * PORTS_OF_A_PART
                part = part_number(index, num_parts, num_stages)
                for kind in self._kinds:
                    offer = await self._offer(
                        kind, source, host, advertised_host or host, first_port
                    )
                    self.offers.append(msgspec.structs.replace(offer, part=part))
        except BaseException:
            await self.close()
            raise
        for offer in self.offers:
            if offer.unavailable:
                log.info("%s is not offered: %s", offer.name, offer.unavailable)
            else:
                log.info("%s is offered", offer.name)

    async def _offer(
        self,
        kind: TransportKind,
        source: Source,
        host: str,
        advertised_host: str,
        first_port: int,
    ) -> TransportOffer:
        obstacle = kind.obstacle(source.pool)
        if obstacle is not None:
            return TransportOffer(name=kind.name, unavailable=obstacle)
        server = kind.server(source)
        self._servers.append(server)
        try:
            port = first_port and first_port + kind.port_offset
            return await server.start(host, advertised_host, port)
        except TransportUnavailable as error:
            return TransportOffer(name=kind.name, unavailable=error.message)

    async def close(self) -> None:
        """Stop serving. Afterwards, nothing here reads the pool.

        All servers are closed, even if one of them fails.
        """
        self.offers.clear()
        async with AsyncExitStack() as closing:
            for server in self._servers:
                closing.push_async_callback(server.close)
            self._servers = []

    def issue(
        self,
        request_id: str,
        first_token: int,
        num_tokens: int,
        block_ids: Sequence[int],
        layers: range | None = None,
    ) -> bytes:
        """A sealed ticket for the present KV of tokens [first_token, first_token + num_tokens).

        `block_ids` are exactly the blocks that hold these tokens; `first_token` need not be in the
        first slot of the first one. `layers` are the computed layers; None: all.

        A ticket may be used at once. So with a pool on a GPU, the kernels that write the KV must
        have finished, not just have been launched: wait for an event on the model's stream first.

        Raises:
            ValueError: the blocks do not match the token range or the pool, or are more than
                `max_ticket_blocks`, or layers are invalid.
        """
        ids = self._check_blocks(first_token, num_tokens, block_ids)
        if layers is None:
            layers = range(self.layout.num_layers)
        if not 0 <= layers.start < layers.stop <= self.layout.num_layers:
            raise ValueError(f"layers {layers} are not some of {self.layout.num_layers}")
        self.statistics.tickets_issued += 1
        box_ids = ids
        if self._companions is not None:
            ids = self._with_companions(ids, self._companions)
        return self._sealer.seal(
            Ticket(
                version=3,
                node_id=self.node_id,
                incarnation=self.incarnation,
                request_id=request_id,
                fingerprint=self.identity.fingerprint,
                first_token=first_token,
                num_tokens=num_tokens,
                block_ids=ids.tolist(),
                generations=self.pool.generations[ids].tolist(),
                first_layer=layers.start,
                end_layer=layers.stop,
                checksums=self._checksums(box_ids, first_token, num_tokens, layers),
                expires_at_s=self._clock.now() + self._tickets.lifetime_s,
            )
        )

    def open_ticket(self, sealed: bytes) -> Ticket:
        """Verify a ticket, and check that it fits the pool."""
        ticket = self._sealer.open(sealed)
        ticket.check(self.pool.num_blocks, self.layout)
        self._spread.on_ticket(ticket)
        return ticket

    def check_access(self, token: bytes) -> None:
        """Check that a connection belongs to an open session, before anything else is read."""
        try:
            self._access.check(token)
        except AccessDenied:
            self.statistics.refused += 1
            raise

    def has_access(self, token: bytes) -> bool:
        """Whether a connection's session is still open."""
        return token in self._access

    async def introduce(self, welcome: ExporterWelcome) -> None:
        """Tell the other hosts of this node of a new session, before its puller comes to them.

        Raises:
            PeerLost: one of them is lost.
        """
        for host in self._spread.hosts:
            await host.admit(welcome.access)

    def dismiss(self, welcome: ExporterWelcome) -> None:
        """The session that began with this welcome has ended: revoke its access."""
        self._access.revoke(welcome.access)
        for host in self._spread.hosts:
            host.dismiss(welcome.access)

    def admit(self, token: bytes) -> None:
        """On another host of the node: let the pullers of a session in."""
        self._access.add(token)

    def forget(self, token: bytes) -> None:
        """On another host of the node: the session has ended."""
        self._access.revoke(token)

    def welcome(self) -> ExporterWelcome:
        """The welcome of a new session: what its puller needs to connect. Call after `start`."""
        return ExporterWelcome(
            node_id=self.node_id,
            incarnation=self.incarnation,
            fingerprint=self.identity.fingerprint,
            layout=self.layout,
            num_blocks=self.pool.num_blocks,
            memory=self.pool.kind,
            host_id=self._host_id,
            access=self._access.grant(),
            offers=list(self.offers),
            protocol=PROTOCOL,
        )

    def check_hello(self, hello: PullerHello) -> None:
        """Check that a coordinator has sent this puller, and that it can use our KV.

        Raises:
            StaleIncarnation: it was sent to another incarnation.
            ConfigError: it is of a build that we do not understand, or that does not understand us.
            AccessDenied: it has no introduction by one of our coordinators.
            LayoutMismatch: another model, or an incompatible layout.
            PeerLost: hosts of this node do not serve their parts yet.
        """
        try:
            if hello.exporter_incarnation != self.incarnation:
                raise StaleIncarnation(
                    f"{hello.node_id!r} means incarnation {hello.exporter_incarnation!r} of "
                    f"{self.node_id!r}, this is {self.incarnation!r}"
                )
            if not is_introduced(
                self.introduction_key, self.incarnation, hello.incarnation, hello.introduction
            ):
                raise AccessDenied(f"no coordinator of {self.node_id!r} sent {hello.node_id!r}")
            check_protocol(hello.protocol, hello.node_id)
            self.identity.check_peer(hello.node_id, hello.fingerprint, hello.layout)
            if self._spread.hosts and len({offer.part for offer in self.offers}) < self._num_parts:
                raise PeerLost(f"other hosts of {self.node_id} are still loading: try again")
        except (StaleIncarnation, AccessDenied, ConfigError, LayoutMismatch, PeerLost):
            self.statistics.refused += 1
            raise

    def _checksums(
        self, ids: NDArray[np.int64], first_token: int, num_tokens: int, layers: range
    ) -> bytes:
        if not self._tickets.with_checksums or not isinstance(self.pool, ExportedPool):
            return b""
        box = whole_box(self.layout, first_token, first_token + num_tokens)
        box = msgspec.structs.replace(box, first_layer=layers.start, end_layer=layers.stop)
        sums: Sums | None = None
        for piece in pieces(box, self.layout):
            layout, which = part_of(self.layout, piece)
            own = ids
            if which and self._companions is not None:  # of what was given back any sum will do
                own = np.maximum(self._companions[ids, which - 1].astype(np.int64), 0)
            run = BlockRun(layout, own, layout.full_blocks(first_token))
            found = block_sums(self.pool.flat, run, piece, self._groups)
            sums = found if sums is None else sums + found
        assert sums is not None, "a ticket has layers"
        return sums.astype("<u8").tobytes()

    def _with_companions(self, ids: NDArray[np.int64], companions: Companions) -> NDArray[np.int64]:
        """The blocks of a ticket, in its order."""
        kinds = companions[ids].T
        return np.concatenate([ids, np.where(kinds == NONE, ids, kinds).ravel()])

    def _check_blocks(
        self, first_token: int, num_tokens: int, block_ids: Sequence[int]
    ) -> NDArray[np.int64]:
        ids = np.array(block_ids, dtype=np.int64)
        end_token = first_token + num_tokens
        expected = len(need.block_range(first_token, end_token, self.layout.block_size))
        if first_token < 0 or num_tokens <= 0 or len(ids) != expected:
            raise ValueError(
                f"tokens {first_token}..{end_token} take {expected} blocks, given {len(ids)}"
            )
        if ids.min() < 0 or ids.max() >= self.pool.num_blocks:
            raise ValueError(f"block ids {block_ids} are not all in 0..{self.pool.num_blocks}")
        return ids
