"""The way of one request through the cluster: when it was sent where, and what nodes say of it.

Nothing is measured for this that is not known anyway: the times of dispatches, of token 1 and of
the end by the coordinator's clock, and the phases that nodes report as durations
(`protocol.PhaseTimes`). `phases.py` lays the phases out on that clock.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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
