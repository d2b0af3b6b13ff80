"""All handoffs of a node, of prompts and of streams, from the first part announced until settled.

    open ──announce──► announced ──publish──► published ──settle──► gone
      │                    │                     │
      └────────────end (finished, failed, cancelled, lease over)──► gone

Several answers to one prompt are handed off one by one, each under its own request id, when its
decode node subscribes. Their handoffs hold the same blocks, which are freed when the last handoff
ends. A subscriber that asks for everything at the end receives nothing before the end.

KV is normally announced at the end of the step that computes it. If that is much KV, it is
announced layer by layer while the step runs, so that little is left to pull after the last token.
Not of a stream that decodes here: if the step takes too much memory, it is dropped, and the stream
may lose its blocks, of which those layers would be.

A stream that decodes here can be handed off, too. It goes on while its complete blocks are pulled;
when its subscriber has them, it ends with its next token, as a prefill ends with token 1:

    subscribe ──► announced ──take over──► ends with its next token ──publish──► published ──► ...
                     ▲           │ │
                     └─more──────┘ └──the subscriber leaves, or fails──► goes on here

Whatever goes wrong while KV is announced ends that handoff alone: neither the node nor the session
that it is announced to.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from kv_transfer.exporter import Exporter
from pdserve.engine.kv.block_pool import BlockPool
from pdserve.engine.request import Request, Scheduled
from pdserve.node.sessions.server import Subscriber
from pdserve.protocol import HandoffEnded, HandoffRecord
from pdserve.protocol.legs import is_earlier
from pdserve.shared.errors import PdserveError, PeerLost, RequestEnded, TransferTimeout
from prefill_node.handoff import Handoff, HeldKv, PinnedBlocks

log = logging.getLogger(__name__)

_MAX_LAYER_GROUPS = 8  # per step: with more groups the last one would hardly be smaller


class Handoffs:
    """All handoffs of one node.

    `on_settled` is called for handoffs that every subscriber is done with, `on_failed` for those
    that nobody subscribed to within `lease_s`, or whose KV could not be announced; neither for a
    stream that goes on here. During a step, KV is announced from `announce_bytes` on; with 0,
    never. `find` returns the request of an id that the engine has, if there is one.
    """

    def __init__(
        self,
        exporter: Exporter,
        pool: BlockPool,
        *,
        on_settled: Callable[[str], None],
        on_failed: Callable[[str, PdserveError], None],
        lease_s: float,
        announce_bytes: int,
        find: Callable[[str], Request | None] = lambda request_id: None,
        on_leaving: Callable[[], None] = lambda: None,
    ) -> None:
        self._exporter = exporter
        self._pinned = PinnedBlocks(pool)
        self._on_settled = on_settled
        self._on_failed = on_failed
        self._lease_s = lease_s
        self._announce_bytes = announce_bytes
        self._num_layers = exporter.layout.num_layers
        self._handoffs: dict[str, Handoff] = {}
        self._find = find
        self._on_leaving = on_leaving  # a stream is to end here: plans that were made change
        self._streams: dict[str, Request] = {}  # those to be taken over, by request id

    @property
    def num_pinned_blocks(self) -> int:
        """Number of blocks held for decode nodes to pull."""
        return len(self._pinned)

    def __len__(self) -> int:
        return len(self._handoffs)

    def taker_knows(self, request_id: str) -> int | None:
        """How many output tokens the node knows that takes this stream over; None: nobody does."""
        return self._handoffs[request_id].num_emitted if request_id in self._streams else None

    def leaving(self, request_id: str) -> Request | None:
        """The stream of this id that is being taken over, until its taker has it; None: no such."""
        return self._streams.get(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._handoffs

    # ---- the prefill leg's side ----------------------------------------------------------------

    def open(self, request_id: str) -> None:
        """Open the handoff of a prefill leg that has arrived."""
        handoff = self._get_or_make(request_id)
        handoff.is_open = True
        handoff.stop_lease()  # started by a subscription that came first

    def begin_step(self, rows: Sequence[Scheduled]) -> list[int]:
        """Announce what the prefix cache has spared the step that is about to run.

        Returns the layer counts, ascending, after which `layers_done` will have enough KV to
        announce.
        """
        if not self._announce_bytes or not self._handoffs:
            return []
        but_last = self._num_layers - 1  # the last layer is announced when the step is over
        most_bytes = 0
        for row in _that_stay(rows):
            computed = row.request.num_computed_tokens
            for handoff in self._of(row.request):
                with self._containing(handoff):
                    handoff.announce_if(
                        row.request, computed, self._num_layers, self._announce_bytes
                    )
                    end = computed + row.num_tokens
                    to_come = handoff.held.missing(row.request, end, but_last)
                    most_bytes = max(most_bytes, handoff.held.num_bytes(to_come))
        if most_bytes < self._announce_bytes:
            return []
        enough = -(-but_last * self._announce_bytes // most_bytes)
        group = max(enough, -(-self._num_layers // _MAX_LAYER_GROUPS))
        return list(range(group, self._num_layers, group))

    def layers_done(self, rows: Sequence[Scheduled], num_layers: int) -> None:
        """Announce what the running step has completed, `num_layers` layers, where it is enough."""
        for row in _that_stay(rows):
            for handoff in self._of(row.request):
                computed = row.request.num_computed_tokens + row.num_tokens
                with self._containing(handoff):
                    handoff.announce_if(row.request, computed, num_layers, self._announce_bytes)

    def announce(self, request: Request) -> None:
        """Announce the blocks that a finished step has completed, as far as not announced yet."""
        for handoff in self._of(request):
            with self._containing(handoff):
                handoff.announce_if(request, request.num_computed_tokens, self._num_layers, 0)

    def publish(self, request: Request, record: HandoffRecord) -> None:
        """Publish that the request has ended here, in one message with the last part to announce.

        `record` belongs to one of the request's answers. The lease starts, unless there is a
        subscriber.
        """
        handoff = self._handoffs.get(record.request_id)
        if handoff is None:
            return
        with self._containing(handoff):
            handoff.publish(request, record)
        if record.request_id in self and not handoff.subscribers:
            self._start_lease(record.request_id, handoff)

    def end(self, request_id: str, reason: PdserveError) -> None:
        """End a handoff and notify its subscribers; does nothing if there is none.

        What goes wrong in doing so is only logged: what ends has no more use for it.
        """
        handoff = self._handoffs.pop(request_id, None)
        self._streams.pop(request_id, None)
        if handoff is None:
            return
        try:
            handoff.end(reason)
        except Exception:  # a broken subscriber, or books that a former failure has left wrong
            log.exception("the handoff of %s could not be ended cleanly", request_id)

    def end_streams(self) -> None:
        """End the handoffs of streams that have ended by themselves before they were taken over."""
        for request_id, stream in list(self._streams.items()):
            if stream.is_done and self._handoffs[request_id].goes_on_here:
                self.end(request_id, RequestEnded("it has ended on the node where it was"))

    # ---- the sessions' side --------------------------------------------------------------------

    def subscribe(self, request_id: str, subscriber: Subscriber, *, at_end: bool = False) -> None:
        """As Announcer.subscribe; the prefill leg may not have arrived yet."""
        handoff = self._get_or_make(request_id)
        # A subscriber that subscribed several times unsubscribes only once.
        is_follower = handoff.subscribers.setdefault(subscriber, not at_end)
        if is_follower or handoff.record is not None:
            with self._containing(handoff):
                handoff.repeat(subscriber)
        if handoff.is_open:
            handoff.stop_lease()
        elif not handoff.is_leased:
            self._start_lease(request_id, handoff)  # bounds the wait for a leg that never comes

    def subscribe_to_stream(
        self, request_id: str, subscriber: Subscriber, num_emitted: int, taker: str
    ) -> None:
        """As Announcer.subscribe_to_stream.

        A coordinator has one node at a time take a stream over, so the one with the earlier leg has
        been told to give it up. It may be ending a pull before it settles, or, if it subscribed
        late, before it hears so.
        """
        error = PeerLost("it does not decode here, or not any more")
        former = self._handoffs.get(request_id)
        if former is not None and former.goes_on_here:
            if is_earlier(taker, former.taker):
                error = PeerLost(f"{former.taker} is to take it over instead of {taker}")
            else:
                self.end(request_id, PeerLost("another node is to take it over instead"))
        stream = self._find(request_id)
        is_kept = request_id in self._handoffs  # for another one, or it has ended here
        if stream is None or is_kept or not _can_leave(stream, num_emitted):
            code, message = error.code, error.message
            subscriber(HandoffEnded(request_id=request_id, code=code, message=message))
            return
        handoff = self._get_or_make(request_id)
        handoff.stream, handoff.num_emitted, handoff.taker = stream, num_emitted, taker
        handoff.is_open = True
        handoff.subscribers[subscriber] = False  # it is told everything at once
        self._streams[request_id] = stream
        with self._containing(handoff):
            handoff.announce_complete(stream)
            handoff.repeat(subscriber)
            handoff.subscribers[subscriber] = True

    def take_over(self, request_id: str, subscriber: Subscriber) -> None:
        """As Announcer.take_over."""
        handoff, stream = self._handoffs.get(request_id), self._streams.get(request_id)
        if handoff is None or stream is None or subscriber not in handoff.subscribers:
            return
        if not stream.is_decoding:
            self.end(request_id, PeerLost("it was preempted"))
            return
        with self._containing(handoff):
            if not handoff.announce_complete(stream) and stream.leg_token_limit is None:
                stream.leg_token_limit = len(stream.output_token_ids) + 1
                self._on_leaving()

    def renew(self, request_id: str, subscriber: Subscriber) -> None:
        """Repeat all announcements with fresh tickets, for a subscriber whose tickets are old."""
        handoff = self._handoffs.get(request_id)
        if handoff is not None and subscriber in handoff.subscribers:
            with self._containing(handoff):
                handoff.repeat(subscriber)

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """Remove a subscriber whose session broke."""
        handoff = self._leave(request_id, subscriber)
        if handoff is None or handoff.subscribers:
            return
        if handoff.was_pulled or handoff.stream is not None:
            self._settle(request_id)  # another one has the KV, and this was the last; or none comes
        else:
            self._start_lease(request_id, handoff)

    def settle(self, request_id: str, subscriber: Subscriber, *, was_pulled: bool) -> None:
        """Remove a subscriber that has pulled the KV, or has given the request up.

        The last subscriber to settle frees the blocks. A message from a node that is not a
        subscriber is ignored: it belongs to an earlier handoff of the same request.
        """
        handoff = self._leave(request_id, subscriber)
        if handoff is None:
            return
        handoff.was_pulled |= was_pulled
        if not handoff.subscribers:
            self._settle(request_id)

    # ---- parts ---------------------------------------------------------------------------------

    def _of(self, request: Request) -> Iterator[Handoff]:
        """Yield the handoffs to announce to now: the request's own, and those of followed siblings.

        Handoffs of the other siblings are announced at the end.
        """
        for answer in request.answers:
            handoff = self._handoffs.get(answer.request_id)
            if handoff is not None and (answer is request or handoff.is_followed):
                yield handoff

    @contextmanager
    def _containing(self, handoff: Handoff) -> Iterator[None]:
        """End the handoff if the body raises, and fail its leg."""
        try:
            yield
        except Exception as error:  # one bad handoff must not end the node
            request_id = handoff.held.request_id
            log.exception("the handoff of %s failed", request_id)
            if not isinstance(error, PdserveError):
                error = PdserveError(f"the handoff failed: {type(error).__name__}: {error}")
            goes_on = handoff.goes_on_here
            self.end(request_id, error)
            if not goes_on:
                self._on_failed(request_id, error)

    def _get_or_make(self, request_id: str) -> Handoff:
        handoff = self._handoffs.get(request_id)
        if handoff is None:
            held = HeldKv(request_id, self._exporter, self._pinned)
            handoff = self._handoffs[request_id] = Handoff(held)
        return handoff

    def _leave(self, request_id: str, subscriber: Subscriber) -> Handoff | None:
        handoff = self._handoffs.get(request_id)
        if handoff is None or subscriber not in handoff.subscribers:
            return None
        del handoff.subscribers[subscriber]
        return handoff

    def _settle(self, request_id: str) -> None:
        handoff = self._handoffs.pop(request_id)
        self._streams.pop(request_id, None)
        log.debug("handoff of %s settled, pulled: %s", request_id, handoff.was_pulled)
        handoff.end()
        if not handoff.goes_on_here:
            self._on_settled(request_id)

    def _start_lease(self, request_id: str, handoff: Handoff) -> None:
        handoff.start_lease(self._lease_s, partial(self._expire, request_id))

    def _expire(self, request_id: str) -> None:
        handoff = self._handoffs[request_id]
        waited_for = "puller" if handoff.is_open else "prefill leg"
        error = TransferTimeout(f"no {waited_for} of {request_id} came within {self._lease_s} s")
        log.warning("%s", error)
        self.end(request_id, error)
        if handoff.is_open:
            self._on_failed(request_id, error)


def _that_stay(rows: Sequence[Scheduled]) -> Iterator[Scheduled]:
    """Yield the rows whose requests keep their blocks even if the step is dropped."""
    return (row for row in rows if row.request.is_prefill_leg and not row.request.is_cancelled)


def _can_leave(stream: Request, num_emitted: int) -> bool:
    """Whether a stream can be taken over by a node that knows so many of its output tokens."""
    knows_some = 0 < num_emitted <= len(stream.output_token_ids)
    return knows_some and stream.is_decoding and not (stream.is_prefill_leg or stream.is_done)
