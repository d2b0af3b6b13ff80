"""A request's life on one node as named timestamps, so every latency is a subtraction.

Stamps are seconds of the node's own clock and never leave the node; `phase_times` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.protocol import PhaseTimes


@dataclass(slots=True)
class Lifecycle:
    """Timestamps of one leg; None until it happened."""

    received_s: float
    scheduled_s: float | None = None  # first scheduled for prefill here
    first_token_s: float | None = None  # sampled here
    record_s: float | None = None  # handoff record received: the prefill is over
    pulled_s: float | None = None  # last pull completed
    joined_s: float | None = None  # first step that had the adopted request in its batch
    finished_s: float | None = None
    transfer_s: float = 0.0  # sum of the pulls' durations

    def phase_times(self) -> PhaseTimes:
        """Durations of the phases that took place on this node."""
        return PhaseTimes(
            queue_s=_span(self.received_s, self.scheduled_s),
            prefill_s=_span(self.scheduled_s, self.first_token_s),
            transfer_s=self.transfer_s,
            wait_s=self._handoff_wait_s(),
            decode_s=_span(self.joined_s or self.first_token_s, self.finished_s),
        )

    def _handoff_wait_s(self) -> float:
        """End of prefill -> joined, less the tail of the transfer that fell into it."""
        tail_s = _span(self.record_s, self.pulled_s)
        return max(0.0, _span(self.record_s, self.joined_s) - tail_s)


def _span(start_s: float | None, end_s: float | None) -> float:
    return 0.0 if start_s is None or end_s is None else max(0.0, end_s - start_s)
