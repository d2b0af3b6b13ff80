"""The side that has the blocks: issues tickets for them, and serves its pool to pullers.

Life of a ticket here: `issue` reads the blocks' present generations and seals them in; a puller
presents it (two-sided transports) or just reads (one-sided); when the blocks are given to somebody
else, `pool.bump` makes it stale. Nothing here pins blocks: leases are the node's business.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kv_transfer.handshake import KvIdentity
from kv_transfer.host import host_id
from kv_transfer.memory import ExportedPool
from kv_transfer.statistics import ExporterStatistics
from kv_transfer.ticket import Ticket, TicketSealer
from kv_transfer.transports.catalog import KINDS, ServerFactory
from pdserve.clock import Clock
from pdserve.errors import LayoutMismatch, StaleIncarnation
from pdserve.kv_layout import KvLayout
from pdserve.protocol import ExporterWelcome, PullerHello, TransportOffer

logger = logging.getLogger(__name__)

TICKET_LIFETIME_S = 600.0

DEFAULT_SERVERS = tuple(kind.server for kind in KINDS.values())


class Exporter:
    """One life of one node's exported pool. Uses the pool, owns the servers.

    All methods belong to the event loop's thread.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        identity: KvIdentity,
        pool: ExportedPool,
        clock: Clock,
        servers: Sequence[ServerFactory] = DEFAULT_SERVERS,
    ) -> None:
        if pool.block_bytes != identity.layout.block_bytes:
            raise ValueError(
                f"the pool has blocks of {pool.block_bytes} bytes, the layout of "
                f"{identity.layout.block_bytes}"
            )
        self.node_id = node_id
        self.incarnation = incarnation
        self.identity = identity
        self.pool = pool
        self.statistics = ExporterStatistics()
        self.offers: list[TransportOffer] = []
        self._clock = clock
        self._sealer = TicketSealer(incarnation, clock)
        self._servers = [factory(self) for factory in servers]
        self._host_id = host_id()

    @property
    def layout(self) -> KvLayout:
        """Of the exported pool."""
        return self.identity.layout

    async def start(self, host: str, advertised_host: str | None = None) -> None:
        """Start serving on `host`; peers are told `advertised_host`, where that is another name.

        Raises:
            OSError: the address cannot be listened on; then nothing is left running.
        """
        try:
            for server in self._servers:
                self.offers.append(await server.start(host, advertised_host or host))
        except OSError:
            await self.close()
            raise
        logger.info("KV of %s is offered by %s", self.node_id, self.offers)

    async def close(self) -> None:
        """Stop serving. After it, nothing here reads the pool any more."""
        self.offers.clear()
        for server in self._servers:
            await server.close()

    def issue(
        self,
        request_id: str,
        first_token: int,
        num_tokens: int,
        block_ids: Sequence[int],
        lifetime_s: float = TICKET_LIFETIME_S,
    ) -> bytes:
        """A sealed ticket for tokens [first_token, first_token + num_tokens) as they are now.

        `block_ids` are the blocks that hold these tokens, and only these: the first one holds
        `first_token`, perhaps not in its first slot.

        Raises:
            ValueError: the blocks do not fit the range or the pool.
        """
        ids = self._check_blocks(first_token, num_tokens, block_ids)
        self.statistics.tickets_issued += 1
        return self._sealer.seal(
            Ticket(
                version=1,
                node_id=self.node_id,
                incarnation=self.incarnation,
                request_id=request_id,
                fingerprint=self.identity.fingerprint,
                first_token=first_token,
                num_tokens=num_tokens,
                block_ids=ids.tolist(),
                generations=self.pool.generations[ids].tolist(),
                expires_at_s=self._clock.now() + lifetime_s,
            )
        )

    def open_ticket(self, sealed: bytes) -> Ticket:
        """As Source.open_ticket."""
        ticket = self._sealer.open(sealed)
        ticket.check(self.pool.num_blocks, self.layout.block_size)
        return ticket

    def welcome(self) -> ExporterWelcome:
        """What a puller needs to know to connect. Complete once started."""
        return ExporterWelcome(
            node_id=self.node_id,
            incarnation=self.incarnation,
            fingerprint=self.identity.fingerprint,
            layout=self.layout,
            num_blocks=self.pool.num_blocks,
            host_id=self._host_id,
            offers=list(self.offers),
        )

    def check_hello(self, hello: PullerHello) -> None:
        """That the puller means this life of this node, and can use its KV.

        Raises:
            StaleIncarnation: it means another life.
            LayoutMismatch: another model, or a layout that cannot be reconciled.
        """
        try:
            if hello.exporter_incarnation != self.incarnation:
                raise StaleIncarnation(
                    f"{hello.node_id!r} means incarnation {hello.exporter_incarnation!r} of "
                    f"{self.node_id!r}, this is {self.incarnation!r}"
                )
            self.identity.check_peer(hello.node_id, hello.fingerprint, hello.layout)
        except (StaleIncarnation, LayoutMismatch):
            self.statistics.refused += 1
            raise

    def _check_blocks(
        self, first_token: int, num_tokens: int, block_ids: Sequence[int]
    ) -> NDArray[np.int64]:
        ids = np.array(block_ids, dtype=np.int64)
        block_size = self.layout.block_size
        expected = -(-(first_token + num_tokens) // block_size) - first_token // block_size
        if first_token < 0 or num_tokens <= 0 or len(ids) != expected:
            raise ValueError(
                f"tokens {first_token}..{first_token + num_tokens} take {expected} blocks, "
                f"given {len(ids)}"
            )
        if ids.min() < 0 or ids.max() >= self.pool.num_blocks:
            raise ValueError(f"block ids {block_ids} are not all in 0..{self.pool.num_blocks}")
        return ids
