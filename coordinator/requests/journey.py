"""The way of one request through the cluster: when it was sent where, and what nodes say of it.

Nothing is measured for this that is not known anyway: the times of dispatches, of token 1 and of
the end by the coordinator's clock, and the phases that nodes report as durations
(`protocol.PhaseTimes`). `phases` lays them out on that clock.

The intervals, for time lines and for spans of a trace:

    received  started      sent                       token 1                            end
       │admission│   queue   │ queue │     prefill       │ room │ pull │ step │  decode   │
                 (in line)    (on the node)               └────── handoff ────┘

Nodes report durations, since the clocks of two machines differ. They are laid out backwards from
what the coordinator saw: the prefill ends when token 1 arrives, the decode with the last token. So
an interval may be late by the time that a message takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from coordinator.tracing.call_span import CallSpan
from pdserve.protocol import PhaseTimes


@dataclass(slots=True)
class Attempt:
    """One dispatch of a request. Times are seconds on the coordinator's clock."""

    prefill_node: str  # empty: the decode node computes the prompt
    decode_node: str  # empty: nothing is decoded
    sent_s: float
    is_resumed: bool = False  # it goes on after tokens of an earlier attempt
    token_one_s: float | None = None
    at_prefill: PhaseTimes | None = None
    at_decode: PhaseTimes | None = None
    interrupted_s: float | None = None
    reason: str = ""  # why it was interrupted


@dataclass(slots=True)
class Journey:
    """One request, from its receipt to its end."""

    request_id: str
    slo_class: str
    num_prompt_tokens: int
    received_s: float  # by the API
    started_s: float  # handed to admission: before, it was read, rendered and tokenised
    attempts: list[Attempt] = field(default_factory=list)
    num_cached_tokens: int = 0
    num_tokens: int = 0
    ended_s: float | None = None
    error: str = ""  # code; empty: none so far
    span: CallSpan | None = None  # of its call; None: it is not recorded
    tenant: str = ""  # empty: none

    @property
    def ttft_s(self) -> float | None:
        """Receipt to token 1; None before that."""
        at_s = self._token_one_s
        return None if at_s is None else at_s - self.received_s

    @property
    def tpot_s(self) -> float | None:
        """Token 1 to the end, per further token; None without one, or before the end."""
        at_s = self._token_one_s
        if at_s is None or self.ended_s is None or self.num_tokens < 2:
            return None
        return (self.ended_s - at_s) / (self.num_tokens - 1)

    @property
    def _token_one_s(self) -> float | None:
        times = (attempt.token_one_s for attempt in self.attempts)
        return next((at_s for at_s in times if at_s is not None), None)

    def sent(self, prefill_node: str, decode_node: str, at_s: float, *, is_resumed: bool) -> None:
        """The request was sent to these nodes; an empty name is none."""
        self.attempts.append(Attempt(prefill_node, decode_node, at_s, is_resumed))

    def token_one(self, num_cached_tokens: int, at_s: float) -> None:
        """Token 1 has arrived."""
        self.num_cached_tokens = num_cached_tokens
        self.attempts[-1].token_one_s = at_s

    def reported(self, times: PhaseTimes, node_id: str) -> None:
        """A node has reported the phases of its leg."""
        attempt = self.attempts[-1]
        if node_id == attempt.prefill_node:
            attempt.at_prefill = times
        else:
            attempt.at_decode = times

    def interrupted(self, reason: str, at_s: float) -> None:
        """The request was taken from its nodes."""
        self.attempts[-1].interrupted_s = at_s
        self.attempts[-1].reason = reason


PhaseName = Literal[
    "admission", "queue", "prefill", "wait for room", "pull", "join", "decode", "resume"
]


@dataclass(frozen=True, slots=True)
class Phase:
    """An interval in which one thing was done for a request, or waited for."""

    name: PhaseName
    start_s: float
    end_s: float
    node: str = ""  # empty: the coordinator


def phases(journey: Journey) -> list[Phase]:
    """Return the phases of a journey that has ended, in order of their starts."""
    end_s = journey.ended_s
    assert end_s is not None, "it has not ended"
    found = [Phase("admission", journey.received_s, journey.started_s)]
    last_s = journey.started_s
    for attempt in journey.attempts:
        is_first = attempt is journey.attempts[0]
        found.append(Phase("queue" if is_first else "resume", last_s, attempt.sent_s))
        last_s = end_s if attempt.interrupted_s is None else attempt.interrupted_s
        found += _clipped(_of_attempt(attempt, last_s), attempt.sent_s, last_s)
    if not journey.attempts:
        found.append(Phase("queue", last_s, end_s))
    return [phase for phase in found if phase.end_s > phase.start_s]


def _of_attempt(attempt: Attempt, end_s: float) -> Iterator[Phase]:
    node, times = attempt.decode_node, attempt.at_decode
    if not attempt.prefill_node:
        yield from _on_one_node(attempt, times, end_s)
        return
    yield from _prefill(attempt.prefill_node, attempt.at_prefill, attempt.token_one_s or end_s)
    if attempt.token_one_s is None or not node:
        return
    if times is None:
        yield Phase("decode", attempt.token_one_s, end_s, node)
        return
    joined_s = end_s - times.decode_s
    yield from _handoff(node, times, joined_s)
    yield Phase("decode", joined_s, end_s, node)


def _on_one_node(attempt: Attempt, times: PhaseTimes | None, end_s: float) -> Iterator[Phase]:
    """What is prefilled and decoded by the same node."""
    node = attempt.decode_node
    if times is not None:
        joined_s = end_s - times.decode_s
    elif attempt.token_one_s is not None:
        joined_s = attempt.token_one_s
    else:  # interrupted, or cancelled: how far it was is not known
        yield Phase("decode" if attempt.is_resumed else "prefill", attempt.sent_s, end_s, node)
        return
    yield from _prefill(node, times, joined_s)
    yield Phase("decode", joined_s, end_s, node)


def _prefill(node: str, times: PhaseTimes | None, end_s: float) -> Iterator[Phase]:
    if times is None:
        yield Phase("prefill", 0.0, end_s, node)  # from when it was sent
        return
    scheduled_s = end_s - times.prefill_s
    yield Phase("queue", scheduled_s - times.queue_s, scheduled_s, node)
    yield Phase("prefill", scheduled_s, end_s, node)


def _handoff(node: str, times: PhaseTimes, joined_s: float) -> Iterator[Phase]:
    """Its parts but for the messages, which are the gap before it."""
    complete_s = joined_s - times.handoff_step_s
    pulling_s = complete_s - times.handoff_copy_s
    yield Phase("wait for room", pulling_s - times.handoff_room_s, pulling_s, node)
    yield Phase("pull", pulling_s, complete_s, node)
    yield Phase("join", complete_s, joined_s, node)


def _clipped(found: Iterator[Phase], start_s: float, end_s: float) -> Iterator[Phase]:
    """What lies within an attempt: a node's durations may be longer than what was seen of them."""
    for phase in found:
        start, end = max(phase.start_s, start_s), min(phase.end_s, end_s)
        yield Phase(phase.name, min(start, end_s), max(end, start_s), phase.node)
