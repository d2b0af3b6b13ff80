"""Live migration: running streams move from one node to another.

    ask the target to prefetch ──► it pulls full blocks, while the stream goes on ──► prefetched
                              withdrawn, and dispatched to the target ◄── its next token ◄──┘

The target then lacks only the KV of the last few tokens: its running step ends, and the next one
computes them and the stream's next token. So the client waits for at most a step more than
usual. Streams move away from nodes that drain or that have left the decode pool, and in flowing
mode from prefill nodes where they would be late (`coordinator/routing/flowing.py`), as fast as
others have a place for them; the others finish where they are.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from coordinator.registry import Member, Registry
from coordinator.requests.dispatcher import Dispatcher
from coordinator.requests.running import Dispatch, RunningRequest
from pdserve.clock import Clock
from pdserve.metrics import CoordinatorMetrics
from pdserve.protocol import Prefetched

log = logging.getLogger(__name__)

MOST_PER_TARGET: Final = 4  # moves to one node at a time
PREFETCH_S: Final = 2.0  # after which a stream moves with what has been fetched


@dataclass(frozen=True, slots=True)
class _Move:
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
    ) -> None:
        self._registry = registry
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._clock = clock
        self._unwanted: set[Member] = set()  # for decoding
        self._emptied: set[Member] = set()  # of these, those that have streams
        self._moves: dict[str, _Move] = {}  # by the id of the leg to come
        self._next_look: asyncio.Handle | None = None

    def changed(self, member: Member, *, is_wanted: bool) -> None:
        """Move a node's streams away from the moment on when it is not wanted to decode."""
        if is_wanted:
            self.lost(member)
        elif member not in self._unwanted:
            self._unwanted.add(member)
            if _streams_of({member}, self._dispatcher.by_leg):
                self._emptied.add(member)
        self.look()

    def lost(self, member: Member) -> None:
        """Move no more streams away from a node."""
        self._unwanted.discard(member)
        self._emptied.discard(member)

    def look(self) -> None:
        """Begin moves that have become possible. Done soon, once for many changes."""
        if self._next_look is None and (self._emptied or self._dispatcher.flows):
            self._next_look = asyncio.get_running_loop().call_soon(self._begin)

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

    def _begin(self) -> None:
        self._next_look = None
        moving = {move.source_leg for move in self._moves.values()}
        at_target = Counter(move.target for move in self._moves.values())
        streams = _streams_of(self._emptied, self._dispatcher.by_leg)
        self._emptied &= {dispatch.decode for _, dispatch in streams if dispatch.decode}
        leaving = dict.fromkeys([running for running, _ in streams] + self._dispatcher.at_risk())
        for running in leaving:
            if running.request.request_id in moving or running.num_tokens < 2:
                continue
            if running.on_further is not None:
                continue  # it has only just come
            placement = self._dispatcher.place_elsewhere(running)
            if placement is None:
                return  # until something changes
            target = placement.decode
            assert target is not None
            if target in self._emptied or at_target[target] >= MOST_PER_TARGET:
                return
            at_target[target] += 1
            request_id = running.rest()[0].request_id
            timer = asyncio.get_running_loop().call_later(
                PREFETCH_S, partial(self._carry_out, request_id)
            )
            self._moves[request_id] = _Move(running, running.request.request_id, target, timer)
            self._dispatcher.ask_to_prefetch(running, placement)

    def _carry_out(self, request_id: str) -> None:
        move = self._moves.pop(request_id, None)
        if move is None:
            return  # its prefetch was not waited for any longer
        move.timer.cancel()
        running = move.running
        if self._runs_there(move) and move.target.is_ready and move.target in self._registry:
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


def _streams_of(
    members: set[Member], by_leg: Mapping[str, RunningRequest]
) -> list[tuple[RunningRequest, Dispatch]]:
    """Return the requests that decode on these nodes, or will."""
    return [
        (running, dispatch)
        for running in by_leg.values()
        if (dispatch := running.dispatch) is not None and dispatch.decode in members
    ]
