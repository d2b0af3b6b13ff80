"""Flowing mode: a stream stays where its prompt was computed, and moves before it is late.

Every node does both phases (as in TaiChi). Prefill nodes compute prompts in large chunks, whatever
streams are beside them; decode nodes in chunks as small as their streams need. So a request goes to
a decode node if its own TTFT has the time for that, and to a prefill node otherwise. There its
stream stays as long as its TPOT has time to spare. If not, it flows to a decode node that has a
place for it (`coordinator/requests/moves.py`), and never back: so no stream moves to and fro. A
request whose TPOT could not bear prompts beside it at all is handed off, as in disaggregated mode.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from coordinator.nodes.registry import Member
from coordinator.routing.fleet import Fleet
from coordinator.routing.loads.books import Booking, Books
from coordinator.routing.outlook import Outlook, Times
from coordinator.routing.placement import Placement
from coordinator.routing.sides import HARMLESS, USUAL_TPOT_S, OnOneNode, choose, keeps
from pdserve.protocol import NodeRole, Slo
from pdserve.rules.batch import SAFETY
from pdserve.shared.clock import Clock

MADE_UP_WITHIN: Final = 0.25  # of a stream's remaining tokens: they make up for prompts beside it
FEWEST_LEFT: Final = 4  # tokens: for fewer, a move would take longer than it gains


class FlowingStream(NamedTuple):
    """A stream, as far as it matters where it goes on."""

    slack_s: float  # until its next token is due
    tpot_s: float  # promised
    num_left: float  # tokens that it is expected to get


class StreamHost(NamedTuple):
    """What a prefill node does in the next seconds."""

    queue_s: float  # for prompts
    chunk_s: float  # of a step with a chunk of a prompt
    pace_s: float  # of a token, in steps with its streams only


def num_chunks(stream: FlowingStream, host: StreamHost) -> float:
    """Return how many of its tokens a stream gets beside chunks of the prompts that are queued."""
    return min(stream.num_left, host.queue_s / host.chunk_s)


def slack_at_end_s(stream: FlowingStream, host: StreamHost) -> float:
    """Return how long before its due time the last token would come, if the stream stayed.

    It gets one token for each chunk of the prompts that are queued, and then the pace of the other
    streams. Nobody knows how long answers get, or which prompts come next. So what it would gain
    after these prompts counts only in part.
    """
    num_stalled = num_chunks(stream, host)
    num_further = stream.num_left - num_stalled
    gained_s = SAFETY * stream.tpot_s - host.pace_s  # by each further token
    if gained_s > 0:
        gained_s *= MADE_UP_WITHIN
    stalled_s = num_stalled * (host.chunk_s - stream.tpot_s)
    return stream.slack_s - stalled_s + num_further * gained_s


def choose_start(slo: Slo, on_prefill_node: Placement, on_decode_node: OnOneNode) -> Placement:
    """Choose where a request begins.

    On the decode node if that keeps its promise and hardly slows down others, so that prefill
    nodes are there for prompts that need their speed. Otherwise where it scores better.
    """
    other = on_decode_node.placement
    if not on_decode_node.has_place:
        return on_prefill_node
    has_promise = bool(slo.ttft_s or slo.tpot_s)
    if has_promise and on_decode_node.harm <= HARMLESS and keeps(slo, other, SAFETY):
        return other
    return choose(slo, on_prefill_node, on_decode_node)


def flows_from(member: Member) -> bool:
    """Return whether streams of this node move on before they are late."""
    return member.role is NodeRole.PREFILL


class Flowing:
    """Which streams could stay where they are, and which should move on."""

    def __init__(self, fleet: Fleet, books: Books, clock: Clock) -> None:
        self._fleet = fleet
        self._books = books
        self._clock = clock

    def could_stay(self, outlook: Outlook, slot: int) -> bool:
        """Return whether the stream of a new request could stay on a prefill node.

        Nobody knows which prompts come after it: as many as wait there now, or at least a chunk.
        """
        stream, host = self._new(outlook, slot)
        host = host._replace(queue_s=max(host.queue_s, host.chunk_s))
        return outlook.ends_with_token_1 or slack_at_end_s(stream, host) >= 0

    def times(self, outlook: Outlook, slot: int) -> Times:
        """Return the times of a new request on a prefill node where its stream stays."""
        ttft_s = float(outlook.ttft_s[slot])
        if outlook.ends_with_token_1:
            return Times(ttft_s, 0.0)
        stream, host = self._new(outlook, slot)
        num_stalled = num_chunks(stream, host)
        num_further = stream.num_left - num_stalled
        total_s = num_stalled * host.chunk_s + num_further * host.pace_s
        return Times(ttft_s, total_s / stream.num_left)

    def at_risk(self, bookings: Iterable[Booking]) -> list[Booking]:
        """Return the streams on prefill nodes that should move on, the latest first.

        Empty if there is no decode node. A stream whose KV could not be fetched stays.
        """
        if len(self._fleet.ready(NodeRole.DECODE)) == 0:
            return []
        hosts: dict[int, StreamHost] = {}
        slacks_s: dict[Booking, float] = {}
        for booking in bookings:
            slot = self._slot(booking)
            if slot is None or not booking.request.sampling.reuses_prefix:
                continue
            stream = self._stream(booking)
            if stream is None or stream.num_left < FEWEST_LEFT:
                continue
            host = hosts[slot] if slot in hosts else hosts.setdefault(slot, self._host(slot))
            slack_s = slack_at_end_s(stream, host)
            if slack_s < 0:
                slacks_s[booking] = slack_s
        return sorted(slacks_s, key=slacks_s.__getitem__)

    def _new(self, outlook: Outlook, slot: int) -> tuple[FlowingStream, StreamHost]:
        """Return the stream of a new request at its token 1, and its host then."""
        tpot_s = outlook.request.slo.tpot_s or USUAL_TPOT_S
        return FlowingStream(tpot_s, tpot_s, outlook.num_gaps), self._host(slot, outlook.num_tokens)

    def _slot(self, booking: Booking) -> int | None:
        """Return the slot of the prefill node that a stream is on; None for other nodes."""
        decode = booking.placement.decode
        if decode is None or not flows_from(decode):
            return None
        return decode.slot if self._fleet.members[decode.slot] is decode else None

    def _stream(self, booking: Booking) -> FlowingStream | None:
        if booking.first is None:
            return None  # it has no token there yet
        first_s, num_first = booking.first
        tpot_s = booking.request.slo.tpot_s or USUAL_TPOT_S
        due_s = first_s + (booking.num_tokens - num_first + 1) * tpot_s
        return FlowingStream(due_s - self._clock.now(), tpot_s, self._books.left(booking))

    def _host(self, slot: int, num_new: int = 0) -> StreamHost:
        """Return what a node does, with one more stream of `num_new` tokens if there are any."""
        now_s = self._clock.now()
        batch = self._books.decodes.at(now_s, now_s)
        requests = max(int(batch.requests[slot]) + (num_new > 0), 1)
        context = int(batch.context[slot]) + num_new
        return StreamHost(
            queue_s=float(self._books.queues.all_s(now_s)[slot]),
            chunk_s=self._fleet.full_step_s(slot),
            pace_s=self._fleet.decode_one_s(slot, requests, context) * self._books.pace_share(slot),
        )
