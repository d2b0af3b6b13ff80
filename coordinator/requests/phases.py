"""A journey as intervals on the coordinator's clock: for time lines, and for spans of a trace.

    received  started      sent                       token 1                            end
       │admission│   queue   │ queue │     prefill       │ room │ pull │ step │  decode   │
                 (in line)    (on the node)               └────── handoff ────┘

Nodes report durations, since the clocks of two machines differ. They are laid out backwards from
what the coordinator saw: the prefill ends when token 1 arrives, the decode with the last token. So
an interval may be late by the time that a message takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from coordinator.requests.journey import Attempt, Journey
from pdserve.protocol import PhaseTimes

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
