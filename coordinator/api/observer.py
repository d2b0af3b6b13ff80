"""What the API tells whoever measures it. Times are seconds as seen at the coordinator.

TTFT, TPOT and ITL are meant as everywhere in pdserve: receipt of the request to the first token
with text; (end of the last token - first token) / (output tokens - 1) per request; each single gap
between tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pdserve.protocol import Slo


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSummary:
    """One call of a generating endpoint, after its end."""

    request_id: str  # as in the response's x-request-id
    endpoint: str  # its path
    slo: Slo | None  # what its class promises; None = it failed before that was known
    is_streaming: bool
    status: int  # HTTP status; 499 = the client went away; in a stream that of the error event
    error_code: str | None
    finish_reason: str | None  # of the first choice
    num_prompt_tokens: int
    num_cached_tokens: int
    num_completion_tokens: int
    e2e_s: float  # receipt to last token, or to the failure
    ttft_s: float | None
    tpot_s: float | None  # of a call with one choice and at least two tokens


class Observer(Protocol):
    """Called on the event loop; must not block or raise."""

    def request_started(self, endpoint: str) -> None:
        """A call of a generating endpoint was received."""
        ...

    def first_token(self, endpoint: str, ttft_s: float) -> None:
        """The first token with text arrived."""
        ...

    def inter_token(self, endpoint: str, itl_s: float) -> None:
        """A further token of a choice arrived; once per token."""
        ...

    def request_finished(self, summary: RequestSummary) -> None:
        """The call is over, well or not. Follows every `request_started`."""
        ...


class NullObserver:
    """Measures nothing."""

    def request_started(self, endpoint: str) -> None:
        """Nothing."""

    def first_token(self, endpoint: str, ttft_s: float) -> None:
        """Nothing."""

    def inter_token(self, endpoint: str, itl_s: float) -> None:
        """Nothing."""

    def request_finished(self, summary: RequestSummary) -> None:
        """Nothing."""
