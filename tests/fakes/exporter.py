"""An exporter that says what the test wants it to say, over a session without a network."""

from __future__ import annotations

from msgspec.structs import replace

from kv_transfer.links.link import Link
from kv_transfer.statistics import PullerStatistics
from kv_transfer.ticket import Ticket, TicketSealer
from pdserve.kv import KvDtype, KvLayout
from pdserve.node.sessions.session import Session
from pdserve.protocol import (
    Announcement,
    ExporterWelcome,
    HandoffEnded,
    HandoffRecord,
    NodeAddress,
    Renew,
    Settle,
    Subscribe,
)
from pdserve.shared.clock import Clock, ManualClock
from tests.fakes.outbox import RecordingOutbox

BLOCK = 4
NUM_LAYERS = 4
HOST = "this host"
SOURCE = NodeAddress(node_id="p", incarnation="1", session_address="p:1")


def make_ticket(first: int, end: int, first_layer: int = 0, end_layer: int = NUM_LAYERS) -> bytes:
    """A sealed ticket for these tokens and layers, in blocks 0, 1, ... of a pool elsewhere."""
    blocks = list(range(first // BLOCK, -(-end // BLOCK)))
    return TicketSealer("1", ManualClock()).seal(
        Ticket(
            version=3,
            node_id="p",
            incarnation="1",
            request_id="r",
            fingerprint="",
            first_token=first,
            num_tokens=end - first,
            block_ids=blocks,
            generations=[0] * len(blocks),
            first_layer=first_layer,
            end_layer=end_layer,
            checksums=b"",
            expires_at_s=1.0,
        )
    )


class ScriptedExporter:
    """The other end of `session`."""

    def __init__(self, clock: Clock, host_id: str = HOST) -> None:
        layout = KvLayout(
            num_layers=NUM_LAYERS,
            num_kv_heads=1,
            head_dim=8,
            block_size=BLOCK,
            dtype=KvDtype.FLOAT32,
        )
        welcome = ExporterWelcome(
            node_id="p",
            incarnation="1",
            fingerprint="",
            layout=layout,
            num_blocks=64,
            memory="cpu",
            host_id=host_id,
            access=b"",
            offers=[],
        )
        self.outbox = RecordingOutbox()
        link = Link(welcome, [], [], {}, PullerStatistics())  # nobody connects it
        self.session = Session(SOURCE, link, self.outbox, clock)

    async def get(self, peer: NodeAddress) -> Session:
        """As Sessions.get."""
        assert peer is SOURCE
        return self.session

    def say(self, message: Announcement | HandoffRecord | HandoffEnded) -> None:
        """To the newest subscription of the request."""
        subscription_id = [
            m.subscription_id
            for m in self.outbox.sent
            if isinstance(m, Subscribe) and m.request_id == message.request_id
        ][-1]
        self.session.receive(replace(message, subscription_id=subscription_id))

    def announce(
        self, first: int, end: int, *layers: int, request_id: str = "r", is_restart: bool = False
    ) -> None:
        """Say that these tokens, in these layers, can be pulled."""
        self.say(
            Announcement(
                request_id=request_id,
                ticket=make_ticket(first, end, *layers),
                is_restart=is_restart,
            )
        )

    @property
    def settled(self) -> list[bool]:
        """Whether each subscription that has ended had pulled all."""
        return [m.pulled for m in self.outbox.sent if isinstance(m, Settle)]

    @property
    def num_renewals(self) -> int:
        """How often it was asked to say everything again."""
        return sum(isinstance(m, Renew) for m in self.outbox.sent)
