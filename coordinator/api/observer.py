"""Interface for measuring calls. Times are in seconds, as seen at the coordinator.

TTFT, TPOT and ITL have the same meaning as everywhere in pdserve. TTFT: receipt of the request to
the first token with text. TPOT: (last token - first token) / (output tokens - 1), per request.
ITL: each gap between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from coordinator.api.answer.bodies import TierUsage
from coordinator.tracing.call_span import CallSpan
from pdserve._native import Histogram
from pdserve.protocol import Slo


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A finished call of a generating endpoint."""

    request_id: str  # as in the response's x-request-id
    endpoint: str  # path of the endpoint
    slo: Slo | None  # targets of its service class; None = the call failed before they were known
    is_streaming: bool
    status: int  # HTTP status; 499 = client disconnected; for a failed stream, the error's status
    error_code: str | None
    finish_reason: str | None  # of the first choice
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    e2e_s: float  # receipt to last token, or to the failure
    ttft_s: float | None
    tpot_s: float | None  # of a call with one choice and at least two tokens
    received_s: float = 0.0  # on the coordinator's clock
    duration_s: float = 0.0  # receipt to the end of the answer
    span: CallSpan | None = None  # of its trace, if it is recorded
    tenant: str = ""  # empty: API keys are not in use
    model: str = ""  # own name of the one it asked for; empty: it failed before that was known
    is_elsewhere: bool = False  # no node of this cluster has made the answer
    lost_tiers: Sequence[TierUsage] = ()  # of a cascade: what nodes did besides


class Observer(Protocol):
    """Receives measurements. Called on the event loop; must not block or raise."""

    @property
    def gaps(self) -> Histogram:
        """What ITLs may be told in place of `inter_token`."""
        ...

    def of(self, model: str) -> Observer:
        """Return who receives those of calls for the model of this name; empty: for none."""
        ...

    def first_token(self, ttft_s: float) -> None:
        """The first token with text arrived."""
        ...

    def inter_token(self, itl_s: float) -> None:
        """A further token of a choice arrived; once per token."""
        ...

    def request_finished(self, summary: RequestSummary) -> None:
        """A call of a generating endpoint ended, successfully or not."""
        ...

    def tier_ended(self, cascade: str, model: str, outcome: str) -> None:
        """A tier of a cascade answers a call, or why not."""
        ...


class NullObserver:
    """Measures nothing."""

    def __init__(self) -> None:
        self.gaps = Histogram([])

    def of(self, model: str) -> NullObserver:
        """Measure nothing of any model."""
        return self

    def first_token(self, ttft_s: float) -> None:
        """Do nothing."""

    def inter_token(self, itl_s: float) -> None:
        """Do nothing."""

    def request_finished(self, summary: RequestSummary) -> None:
        """Do nothing."""

    def tier_ended(self, cascade: str, model: str, outcome: str) -> None:
        """Do nothing."""
