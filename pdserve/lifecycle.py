"""A request's life on one node as named timestamps, so every latency is a subtraction.

Stamps are seconds of the node's own clock and never leave the node; `phase_times` does.

    prefill_end ──messages, copying, waiting for room──► adopted ──► joined
        (elsewhere)                 the handover
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf

from pdserve.protocol import PhaseTimes, Slo

Span = tuple[float, float]  # (start, end)


@dataclass(frozen=True, slots=True)
class Targets:
    """What one leg is to keep: an Slo in points of this node's time. Infinity: no promise."""

    payer: str = ""  # whose share of the node it counts against
    priority: int = 0
    weight: float = 1.0
    first_token_s: float = inf  # token 1 is due
    held_until_s: float = -inf  # token 1 may be held back until then, for lack of a place
    tpot_s: float = inf  # a duration: between two tokens
    deadline_s: float = inf  # nobody wants the answer any more

    @classmethod
    def of(cls, slo: Slo, now_s: float) -> Targets:
        """Of a leg that has just arrived."""
        return cls(
            payer=slo.payer,
            priority=slo.priority,
            weight=slo.weight if slo.weight > 0 else 1.0,  # it is divided by
            first_token_s=now_s + slo.ttft_s if slo.ttft_s else inf,
            held_until_s=now_s + slo.hold_s if slo.hold_s else -inf,
            tpot_s=slo.tpot_s or inf,
            deadline_s=now_s + slo.deadline_s if slo.deadline_s else inf,
        )


NO_TARGETS = Targets()


@dataclass(slots=True)
class Lifecycle:
    """Timestamps of one leg; None until it happened."""

    received_s: float
    scheduled_s: float | None = None  # first scheduled for prefill here
    first_token_s: float | None = None  # sampled here
    prefill_end_s: float | None = None  # on the node that handed it over
    adopted_s: float | None = None  # all that was handed over is here
    joined_s: float | None = None  # first step that had the adopted request in its batch
    finished_s: float | None = None
    room_wait: Span | None = None  # for blocks here
    copies: list[Span] = field(default_factory=list)  # KV bytes on their way; they do not overlap

    def phase_times(self) -> PhaseTimes:
        """Durations of the phases that took place on this node."""
        return PhaseTimes(
            queue_s=_span(self.received_s, self.scheduled_s),
            prefill_s=_span(self.scheduled_s, self.first_token_s),
            transfer_s=sum(end - start for start, end in self.copies),
            handover_s=_span(self.prefill_end_s, self.joined_s),
            handover_copy_s=self._in_handover(self.copies),
            handover_room_s=self._in_handover([self.room_wait] if self.room_wait else []),
            handover_step_s=_span(self.adopted_s, self.joined_s),
            decode_s=_span(self.joined_s or self.first_token_s, self.finished_s),
        )

    def _in_handover(self, spans: Iterable[Span]) -> float:
        """Seconds of these spans that fell between the prefill's end and the first step."""
        if self.prefill_end_s is None:
            return 0.0
        return sum(max(0.0, end - max(start, self.prefill_end_s)) for start, end in spans)


def _span(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else max(0.0, end_s - start_s)
