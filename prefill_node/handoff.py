"""Handoffs: what a prefill node holds for others to pull, from the first chunk until it is settled.

    open ──announce──► announced ──publish──► published ──settle──► gone
      │                    │                     │
      └────────────end (finished, failed, cancelled, lease over)──► gone

A handoff keeps a reference of its own to every announced block, so the request itself may end. What
was said is kept, and said again to whoever subscribes later: before the prefill leg has arrived,
half-way, or after a first decode node died.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from kv_transfer.exporter import Exporter
from pdserve.engine.request import Request
from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.node.session_server import Subscriber
from pdserve.protocol import Announcement, HandoffEnded, HandoffRecord

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Handoff:
    """One request's: what was announced, which blocks are pinned for it, who listens."""

    is_open: bool = False  # its prefill leg has arrived
    num_announced_tokens: int = 0
    block_ids: list[int] = field(default_factory=list)
    said: list[msgspec.Struct] = field(default_factory=list)
    subscribers: list[Subscriber] = field(default_factory=list)
    lease: asyncio.TimerHandle | None = None

    def say(self, message: msgspec.Struct) -> None:
        self.said.append(message)
        for subscriber in self.subscribers:
            subscriber(message)


class Handoffs:
    """All handoffs of one node.

    `retain` and `release` move block references. `on_settled` hears of handoffs that a decode node
    is done with, `on_expired` of those that nobody came for within `lease_s`.
    """

    def __init__(
        self,
        exporter: Exporter,
        block_size: int,
        *,
        retain: Callable[[Sequence[int]], None],
        release: Callable[[Sequence[int]], None],
        on_settled: Callable[[str], None],
        on_expired: Callable[[str, PdserveError], None],
        lease_s: float,
    ) -> None:
        self._exporter = exporter
        self._block_size = block_size
        self._retain = retain
        self._release = release
        self._on_settled = on_settled
        self._on_expired = on_expired
        self._lease_s = lease_s
        self._handoffs: dict[str, _Handoff] = {}

    @property
    def num_pinned_blocks(self) -> int:
        """Blocks held for pulling; one that two handoffs hold counts twice."""
        return sum(len(handoff.block_ids) for handoff in self._handoffs.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._handoffs

    # ---- the prefill leg's side ----------------------------------------------------------------

    def open(self, request_id: str) -> None:
        """A prefill leg has arrived."""
        handoff = self._handoffs.setdefault(request_id, _Handoff())
        handoff.is_open = True
        self._stop_lease(handoff)  # of a subscription that came first

    def announce(self, request: Request) -> None:
        """Announce the blocks that the last step completed; at the prompt's end, all of them."""
        handoff = self._handoffs.get(request.request_id)
        if handoff is None:
            return
        computed = min(request.num_computed_tokens, request.num_prompt_tokens)
        if computed < request.num_prompt_tokens:
            computed -= computed % self._block_size  # the open block is still being written
        first = handoff.num_announced_tokens
        if computed <= first:
            return
        # `first` is a block border, because only the last announcement ends within a block.
        blocks = request.block_table[first // self._block_size : -(-computed // self._block_size)]
        self._retain(blocks)
        handoff.block_ids += blocks
        handoff.num_announced_tokens = computed
        ticket = self._exporter.issue(request.request_id, first, computed - first, blocks)
        handoff.say(Announcement(request_id=request.request_id, ticket=ticket))

    def publish(self, record: HandoffRecord) -> None:
        """The prefill is over: say so, and start the lease unless somebody listens."""
        handoff = self._handoffs.get(record.request_id)
        if handoff is None:
            return
        handoff.say(record)
        if not handoff.subscribers:
            self._start_lease(record.request_id, handoff)

    def end(self, request_id: str, reason: PdserveError) -> None:
        """There is nothing (more) to pull; harmless when there was no handoff."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is None:
            return
        handoff.say(HandoffEnded(request_id=request_id, code=reason.code, message=reason.message))
        self._free(handoff)

    # ---- the sessions' side --------------------------------------------------------------------

    def subscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """Tell `subscriber` everything about this request, which may not have arrived yet."""
        handoff = self._handoffs.setdefault(request_id, _Handoff())
        if subscriber not in handoff.subscribers:  # it unsubscribes once, however often it asked
            handoff.subscribers.append(subscriber)
        for message in handoff.said:
            subscriber(message)
        if handoff.is_open:
            self._stop_lease(handoff)
        elif handoff.lease is None:
            self._start_lease(request_id, handoff)  # bounds the wait for a leg that never comes

    def unsubscribe(self, request_id: str, subscriber: Subscriber) -> None:
        """The subscriber's session broke."""
        handoff = self._handoffs.get(request_id)
        if handoff is None or subscriber not in handoff.subscribers:
            return
        handoff.subscribers.remove(subscriber)
        if not handoff.subscribers:
            self._start_lease(request_id, handoff)

    def settle(self, request_id: str, *, was_pulled: bool) -> None:
        """The decode node has what it needs, or has given the request up."""
        handoff = self._handoffs.pop(request_id, None)
        if handoff is None:
            return
        log.debug("handoff of %s settled, pulled: %s", request_id, was_pulled)
        self._free(handoff)
        self._on_settled(request_id)

    # ---- leases --------------------------------------------------------------------------------

    def _start_lease(self, request_id: str, handoff: _Handoff) -> None:
        self._stop_lease(handoff)
        loop = asyncio.get_running_loop()
        handoff.lease = loop.call_later(self._lease_s, self._expire, request_id)

    def _stop_lease(self, handoff: _Handoff) -> None:
        if handoff.lease is not None:
            handoff.lease.cancel()
            handoff.lease = None

    def _expire(self, request_id: str) -> None:
        handoff = self._handoffs[request_id]
        waited_for = "puller" if handoff.is_open else "prefill leg"
        error = DeadlineExceeded(f"no {waited_for} of {request_id} came within {self._lease_s} s")
        log.warning("%s", error)
        self.end(request_id, error)
        if handoff.is_open:
            self._on_expired(request_id, error)

    def _free(self, handoff: _Handoff) -> None:
        self._stop_lease(handoff)
        if handoff.block_ids:
            self._release(handoff.block_ids)
