"""Streams whose coordinator is lost: they go on for a while, for whoever claims them.

A client that comes back to any coordinator, with the key under which it made its request, has its
stream claimed there (`Claim`), with its log-probabilities if it has any (`KeptScores`). Other
streams, and prompts without token 1, end with their coordinator: nobody could ask for the ones, and
the others are soon computed again. A stream that is being taken over goes on where it is to be, as
it may have ended already where it was.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from pdserve.engine.request import Request
from pdserve.node.legs import Legs
from pdserve.protocol import Claim, Claimed, FinishReason, LegFailed, TokenBatch, TokenEvent
from pdserve.protocol.legs import request_of_leg
from pdserve.wire.outbox import Sender

log = logging.getLogger(__name__)

MOST: Final = 1024  # streams that are kept; each is as long as its request allows


@dataclass(slots=True)
class _Orphan:
    leg_id: str
    request: Request
    token_ids: list[int]
    timer: asyncio.TimerHandle
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None

    def add(self, event: TokenEvent) -> None:
        """Add what is new; the first tokens may have been sampled before they were reported.

        Those of its last node come with a stream that is taken over, and are reported by that one.
        """
        if event.index > len(self.token_ids):
            self.token_ids += self.request.output_token_ids[len(self.token_ids) : event.index]
        if event.index == len(self.token_ids):
            self.token_ids += event.token_ids
        if event.finish_reason is not None:
            self.finish_reason, self.stop_token_id = event.finish_reason, event.stop_token_id


class Orphans:
    """The streams without a coordinator of one node; to `Legs` it is their coordinator."""

    def __init__(
        self,
        find: Callable[[str], Request | None],
        legs: Legs,
        cancel_leg: Callable[[str, str], None],
        keep_s: float,
    ) -> None:
        """
        Args:
            find: the stream of a leg, also if it has ended here and its taker does not have it yet,
                or if it is being taken over.
            legs: the node's.
            cancel_leg: ends a leg, given its id and the reason.
            keep_s: how long a stream is kept.
        """
        self._find = find
        self._legs = legs
        self._cancel_leg = cancel_leg
        self._keep_s = keep_s
        self._orphans: dict[str, _Orphan] = {}  # by request id
        self.num_claimed = 0

    def __len__(self) -> int:
        return len(self._orphans)

    def take_in(self, leg_id: str) -> bool:
        """Keep a leg whose coordinator is lost; returns whether it can be claimed at all."""
        request, request_id = self._find(leg_id), request_of_leg(leg_id)
        if request is None or not request.output_token_ids or not self._legs.is_claimable(leg_id):
            return False
        if len(self._orphans) >= MOST or request_id in self._orphans:
            return False
        token_ids = list(request.output_token_ids)
        if (logprobs := self._legs.scores.of(leg_id)) is not None:
            token_ids = token_ids[: len(logprobs)]
            if not token_ids:
                return False
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._keep_s, partial(self._give_up, request_id))
        self._orphans[request_id] = _Orphan(leg_id, request, token_ids, timer)
        self._legs.hand_over(leg_id, self)
        return True

    def send(self, message: msgspec.Struct) -> None:
        """Keep what a stream's coordinator would have been told (`Sender`)."""
        match message:
            case TokenBatch():
                for event in message.each():
                    orphan = self._orphans.get(request_of_leg(event.request_id))
                    if orphan is not None and orphan.leg_id == event.request_id:
                        orphan.add(event)
            case LegFailed(request_id=leg_id):
                self._forget(request_of_leg(leg_id))

    def claim(self, claim: Claim, link: Sender) -> None:
        """Answer with what there is of a request, and end its stream here."""
        answer = Claimed(request_id=claim.request_id)
        orphan = self._orphans.get(claim.request_id)
        if orphan is not None and not self._legs.scores.is_lost(orphan.leg_id):
            self.num_claimed += 1
            answer = Claimed(
                request_id=claim.request_id,
                token_ids=orphan.token_ids,
                finish_reason=orphan.finish_reason,
                stop_token_id=orphan.stop_token_id,
                logprobs=self._legs.scores.of(orphan.leg_id),
                accepted=orphan.request.num_accepted,
                refused=orphan.request.num_refused,
                adapter=orphan.request.prompt.adapter,
                adapted_from=orphan.request.prompt.adapted_from,
            )
        link.send(answer)
        if orphan is not None:
            self._forget(claim.request_id)
            self._cancel_leg(orphan.leg_id, "it was claimed")

    def _give_up(self, request_id: str) -> None:
        orphan = self._forget(request_id)
        if orphan is not None:
            self._cancel_leg(orphan.leg_id, "its coordinator is gone, and nobody claimed it")

    def _forget(self, request_id: str) -> _Orphan | None:
        orphan = self._orphans.pop(request_id, None)
        if orphan is not None:
            orphan.timer.cancel()
            self._legs.scores.forget(orphan.leg_id)
        return orphan
