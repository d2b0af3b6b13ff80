"""Live migration: running streams move from one node to another.

The target takes a stream over while it runs (`protocol.DecodeLeg`). Whatever goes wrong before the
stream has ended on its node leaves it there; afterwards it is interrupted, and resumes (`Resumes`).

A stream moves without that, as if it were interrupted, if that has failed or if one of the nodes is
of a build that does not know it:

    ask the target to prefetch ──► it pulls full blocks, while the stream goes on ──► prefetched
                              withdrawn, and dispatched to the target ◄── its next token ◄──┘

Then the target has to compute the KV of the last few tokens, in a step after its running one.

Streams move away from nodes that drain or that have left the decode pool, and in flowing mode from
prefill nodes where they would be late (`coordinator/routing/flowing.py`), as fast as others have a
place for them; the others finish where they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from coordinator.generation import Needs
from coordinator.nodes.registry import Member, Registry
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.running import Dispatch, RunningRequest
from coordinator.routing import Placement
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Prefetched, TokenEvent
from pdserve.shared.clock import Clock

log = logging.getLogger(__name__)

MOST_PER_TARGET: Final = 16  # streams that are being taken over by one node at a time
MOST_PREFETCHES: Final = 4  # and those that move to it without that: it computes a part of them
TAKEOVER_S: Final = 10.0  # after which a stream that has not been taken over is to stay
PREFETCH_S: Final = 2.0  # after which a stream moves with what has been fetched


@dataclass(frozen=True, slots=True)
class _Move:
    """Of a stream that is not taken over."""

    running: RunningRequest
    source_leg: str  # id of its leg where it runs
    target: Member
    timer: asyncio.TimerHandle


class Moves:
    """The streams of one coordinator that are about to move."""

    def __init__(
        self,
        registry: Registry,
        dispatcher: Dispatcher,
        metrics: CoordinatorMetrics,
        clock: Clock,
        takeover_s: float = TAKEOVER_S,
        prefetch_s: float = PREFETCH_S,
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._takeover_s = takeover_s
        self._prefetch_s = prefetch_s
        self._unwanted: set[Member] = set()  # for decoding
        self._emptied: set[Member] = set()  # of these, those that have streams
        self._moves: dict[str, _Move] = {}  # by the id of the leg to come
        self._next_look: asyncio.Handle | None = None

    def changed(self, member: Member, *, is_wanted: bool) -> None:
        """Move a node's streams away from the moment on when it is not wanted to decode."""
        if is_wanted:
            self._forget(member)
        elif member not in self._unwanted:
            self._unwanted.add(member)
            if _streams_of({member}, self._dispatcher.by_leg):
                self._emptied.add(member)
            self._stay_away_from(member)
        self.look()

    def lost(self, member: Member) -> None:
        """Move no more streams away from a node, nor to it."""
        self._forget(member)
        self._stay_away_from(member)

    def look(self) -> None:
        """Begin moves that have become possible. Done soon, once for many changes."""
        if self._next_look is None and (self._emptied or self._dispatcher.flows):
            self._next_look = asyncio.get_running_loop().call_soon(self._begin)

    def taken_over(self, event: TokenEvent, running: RunningRequest, sender: Member) -> bool:
        """Deliver a stream's last token on the node where it was; the next ones are its target's.

        Returns False, with the token not delivered, if there is no target any more.
        """
        if running.successor is None:
            return False
        self._dispatcher.taken_over(running)
        running.deliver(event, sender)
        if running.num_tokens == event.index + 1:
            running.on_further = partial(self._moved, self._clock.now())
        else:  # the target's first token was here before the source's last one
            self._metrics.move_pause.observe(0.0)
        self.look()
        return True

    def failed(self, running: RunningRequest) -> None:
        """A target will not take a stream over; it stays where it is, or moves without that."""
        running.shuns_takeovers = True
        self._dispatcher.end_takeover(running, "it stays where it is")
        self.look()

    def prefetched(self, message: Prefetched, sender: Member) -> None:
        """Move a stream whose KV is at its target, right after its next token.

        In the middle of a step, the token that the step computes would be lost. A stream that has
        lost its source meanwhile goes on by itself (`Resumes`), which waits for its next token too.
        """
        move = self._moves.get(message.request_id)
        if move is not None and move.target is sender and self._runs_there(move):
            carry_out = partial(self._carry_out, message.request_id)
            move.running.on_further = partial(asyncio.get_running_loop().call_soon, carry_out)

    # ---- parts ---------------------------------------------------------------------------------

    def _forget(self, member: Member) -> None:
        self._unwanted.discard(member)
        self._emptied.discard(member)

    def _stay_away_from(self, target: Member) -> None:
        """Have a node take over nothing any more: streams stay, until another one is found."""
        for running in dict.fromkeys(self._dispatcher.by_leg.values()):
            if running.successor is not None and running.successor.target is target:
                self._dispatcher.end_takeover(running, "it stays where it is")

    def _begin(self) -> None:
        self._next_look = None
        moving = {move.source_leg for move in self._moves.values()}
        requests = dict.fromkeys(self._dispatcher.by_leg.values())
        successors = [r.successor for r in requests if r.successor is not None]
        taking_over = Counter(successor.target for successor in successors)
        prefetching = Counter(move.target for move in self._moves.values())
        streams = _streams_of(self._emptied, self._dispatcher.by_leg)
        self._emptied &= {dispatch.decode for _, dispatch in streams if dispatch.decode}
        leaving = dict.fromkeys([running for running, _ in streams] + self._dispatcher.at_risk())
        for running in leaving:
            if running.request.request_id in moving or running.num_tokens < 2:
                continue
            if running.on_further is not None or running.successor is not None:
                continue  # it has only just come, or is about to move
            placement = self._dispatcher.place_elsewhere(running)
            if placement is None:
                return  # until something changes
            target = placement.decode
            assert target is not None
            if target in self._emptied:
                return
            if _can_take_over(running, target):
                if taking_over[target] >= MOST_PER_TARGET:
                    return
                taking_over[target] += 1
                self._have_taken_over(running, placement)
            elif not target.hello.arithmetic:  # else it has not the weights for the prompt
                if prefetching[target] >= MOST_PREFETCHES:
                    return
                prefetching[target] += 1
                self._have_prefetched(running, placement, target)

    def _have_taken_over(self, running: RunningRequest, placement: Placement) -> None:
        give_up = partial(self.failed, running)
        timer = asyncio.get_running_loop().call_later(self._takeover_s, give_up)
        self._dispatcher.begin_takeover(running, placement, timer)

    def _have_prefetched(
        self, running: RunningRequest, placement: Placement, target: Member
    ) -> None:
        request_id = running.rest()[0].request_id
        carry_out = partial(self._carry_out, request_id)
        timer = asyncio.get_running_loop().call_later(self._prefetch_s, carry_out)
        self._moves[request_id] = _Move(running, running.request.request_id, target, timer)
        self._dispatcher.ask_to_prefetch(running, placement)

    def _carry_out(self, request_id: str) -> None:
        move = self._moves.pop(request_id, None)
        if move is None:
            return  # its prefetch was not waited for any longer
        move.timer.cancel()
        running = move.running
        can_go = move.target in self._registry and _takes(move.target, running)
        if self._runs_there(move) and can_go:
            began_s = self._clock.now()
            self._dispatcher.move(running, move.target)
            running.on_further = partial(self._moved, began_s)
        self.look()

    def _runs_there(self, move: _Move) -> bool:
        """Whether a stream is still where it was when its move began."""
        return self._dispatcher.by_leg.get(move.source_leg) is move.running

    def _moved(self, began_s: float) -> None:
        """A stream has its first token of its new node."""
        self._metrics.move_pause.observe(self._clock.now() - began_s)


def _takes(target: Member, running: RunningRequest) -> bool:
    """Whether a node accepts a stream still, and has its adapter."""
    adapter = running.request.prompt.adapter
    return target.is_ready and target.serves(Needs(adapter=adapter))


def _can_take_over(running: RunningRequest, target: Member) -> bool:
    """Whether a node can take a stream over from the one where it runs."""
    assert running.dispatch is not None
    source = running.dispatch.decode
    assert source is not None
    return source.exchanges_kv(target) and not running.shuns_takeovers


def _streams_of(
    members: set[Member], by_leg: Mapping[str, RunningRequest]
) -> list[tuple[RunningRequest, Dispatch]]:
    """Return the requests that decode on these nodes, or will."""
    return [
        (running, dispatch)
        for running in by_leg.values()
        if (dispatch := running.dispatch) is not None and dispatch.decode in members
    ]
