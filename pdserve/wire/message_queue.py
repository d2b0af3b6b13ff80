"""What waits to be written to a stream: in order, but legs in turns of those who pay for them.

A node that is behind reads slowly, so legs wait. First come, first served would let a caller that
sends a thousand of them, and even one whose clients have left, delay everybody else's.
"""

from __future__ import annotations

from collections import deque

import msgspec

from pdserve.protocol import CancelLeg, DecodeLeg, PrefillLeg

Leg = PrefillLeg | DecodeLeg


class MessageQueue:
    """Messages by turns.

    Legs of one payer keep their order. A leg that is cancelled before its turn is never sent, and
    neither is its cancel. Any other message comes after all that were added before it.
    """

    def __init__(self) -> None:
        self._first: deque[msgspec.Struct] = deque()
        # Payers in the order of their turns |-> their legs, and cancels of siblings, by request id.
        self._turns: dict[str, dict[str, Leg | CancelLeg]] = {}
        self._payers: dict[str, str] = {}  # request id in a leg that waits |-> its payer

    def __bool__(self) -> bool:
        return bool(self._first or self._turns)

    def add(self, message: msgspec.Struct) -> None:
        """Add a message."""
        if isinstance(message, PrefillLeg | DecodeLeg):
            payer = message.slo.payer
            self._turns.setdefault(payer, {})[message.request_id] = message
            self._payers |= dict.fromkeys(message.request_ids, payer)
        elif isinstance(message, CancelLeg):
            self._cancel(message)
        else:
            while self._turns:
                self._first.append(self._next_leg())
            self._first.append(message)

    def take(self) -> msgspec.Struct:
        """Remove the next message; there must be one."""
        return self._first.popleft() if self._first else self._next_leg()

    def _next_leg(self) -> Leg | CancelLeg:
        payer, legs = next(iter(self._turns.items()))
        request_id, leg = next(iter(legs.items()))
        self._remove(payer, request_id)
        if payer in self._turns:
            self._turns[payer] = self._turns.pop(payer)  # behind the others
        return leg

    def _cancel(self, cancel: CancelLeg) -> None:
        request_id = cancel.request_id
        payer = self._payers.get(request_id)
        if payer is None:  # sent already
            self._first.append(cancel)
        elif request_id in self._turns[payer]:
            self._remove(payer, request_id)
        else:  # a sibling: its prompt is computed for others
            self._turns[payer][request_id] = cancel

    def _remove(self, payer: str, request_id: str) -> None:
        legs = self._turns[payer]
        leg = legs.pop(request_id)
        if not legs:
            del self._turns[payer]
        if not isinstance(leg, CancelLeg):
            for answer_id in leg.request_ids:
                self._payers.pop(answer_id, None)
