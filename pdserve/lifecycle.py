"""A request's life on one node as named timestamps, so that every latency is a subtraction.

The timestamps are seconds on the node's own clock and stay on the node; only the durations in
`phase_times` are sent.

    prefill_end ──► made ──► written ──► read ──► pulling ──► pulled ──► adopted ──► joined
    (other node)     the handoff record            its last part
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from pdserve.protocol import HandoffHops, PhaseTimes, Slo

Span = tuple[float, float]  # (start, end)


@dataclass(frozen=True, slots=True)
class Targets:
    """The promises of one leg: an `Slo` as times on this node's clock. Infinity: no promise."""

    payer: str = ""  # whose fair share the leg counts against
    priority: int = 0
    weight: float = 1.0
    first_token_s: float = inf  # when token 1 is due
    held_until_s: float = -inf  # until when token 1 may be held back, while there is no place
    tpot_s: float = inf  # duration per token
    deadline_s: float = inf  # when the request expires
    tenant: str = ""  # empty: none

    @classmethod
    def of(cls, slo: Slo, now_s: float) -> Targets:
        """The targets of a leg that has just arrived."""
        return cls(
            payer=slo.payer,
            tenant=slo.tenant,
            priority=slo.priority,
            weight=slo.weight if slo.weight > 0 else 1.0,  # used as a divisor
            first_token_s=now_s + slo.ttft_s if slo.ttft_s else inf,
            held_until_s=now_s + slo.hold_s if slo.hold_s else -inf,
            tpot_s=slo.tpot_s or inf,
            deadline_s=now_s + slo.deadline_s if slo.deadline_s else inf,
        )


NO_TARGETS = Targets()


@dataclass(frozen=True, slots=True)
class RecordTimes:
    """When a handoff record and the KV that came with it got where, on the puller's clock."""

    made_s: float
    written_s: float
    read_s: float
    pulling_s: float
    pulled_s: float


@dataclass(slots=True)
class Lifecycle:
    """Timestamps of one leg; None for what has not happened yet."""

    received_s: float
    scheduled_s: float | None = None  # first scheduled for prefill here
    first_token_s: float | None = None  # sampled here
    prefill_end_s: float | None = None  # on the node that handed the request over
    adopted_s: float | None = None  # everything that was handed off has arrived
    joined_s: float | None = None  # start of the first step with the adopted request
    finished_s: float | None = None
    room_wait: Span | None = None  # waiting for blocks here
    copies: list[Span] = field(default_factory=list)  # copying KV; the spans do not overlap
    record: RecordTimes | None = None  # of a request that was handed off

    def phase_times(self) -> PhaseTimes:
        """Durations of the phases on this node."""
        return PhaseTimes(
            queue_s=_span(self.received_s, self.scheduled_s),
            prefill_s=_span(self.scheduled_s, self.first_token_s),
            transfer_s=sum(end - start for start, end in self.copies),
            handoff_s=_span(self.prefill_end_s, self.joined_s),
            handoff_copy_s=self._in_handoff(self.copies),
            handoff_room_s=self._in_handoff([self.room_wait] if self.room_wait else []),
            handoff_step_s=_span(self.adopted_s, self.joined_s),
            handoff_hops=self._hops(),
            decode_s=_span(self.joined_s or self.first_token_s, self.finished_s),
        )

    def _hops(self) -> HandoffHops | None:
        record = self.record
        if record is None:
            return None
        return HandoffHops(
            apply_s=_span(self.prefill_end_s, record.made_s),
            queue_s=_span(record.made_s, record.written_s),
            travel_s=_span(record.written_s, record.read_s),
            turn_s=_span(record.read_s, record.pulling_s),
            pull_s=_span(record.pulling_s, record.pulled_s),
            adopt_s=_span(record.pulled_s, self.adopted_s),
        )

    def _in_handoff(self, spans: Iterable[Span]) -> float:
        """Total time of these spans after the end of the prefill."""
        if self.prefill_end_s is None:
            return 0.0
        return sum(max(0.0, end - max(start, self.prefill_end_s)) for start, end in spans)


def _span(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else max(0.0, end_s - start_s)
