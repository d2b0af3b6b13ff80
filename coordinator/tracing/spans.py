"""A call and the journeys of its requests as spans, with the names of the GenAI conventions.

No server span is defined there yet, so its attributes are those of the client's span. What vLLM
tells of a request besides is told under the same names (`gen_ai.latency.*`); what is ours has our
own prefix.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

from coordinator.api.observer import RequestSummary
from coordinator.requests.journey import Journey, PhaseName, phases
from coordinator.tracing.call_span import CallSpan

Attributes: TypeAlias = dict[str, str | int | float | bool | list[str]]

PROVIDER: Final = "pdserve"
_OPERATIONS: Final = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    **dict.fromkeys(("/v1/rerank", "/rerank", "/v2/rerank"), "rerank"),
    **dict.fromkeys(("/v1/score", "/score"), "score"),
}


_LATENCIES: Final[dict[PhaseName, str]] = {
    "queue": "gen_ai.latency.time_in_queue",
    "prefill": "gen_ai.latency.time_in_model_prefill",
    "decode": "gen_ai.latency.time_in_model_decode",
}


@dataclass(frozen=True, slots=True)
class Span:
    """An interval of a trace. Times are seconds on the coordinator's clock."""

    name: str
    call: CallSpan
    is_server: bool  # the call itself; else a part of it
    start_s: float
    end_s: float
    attributes: Attributes
    error: str = ""  # code; empty: none


def operation_of(endpoint: str) -> str:
    """Return `gen_ai.operation.name` for a path of the API."""
    known = next((path for path in _OPERATIONS if endpoint.startswith(path)), None)
    return _OPERATIONS[known] if known else "chat"


def of_call(summary: RequestSummary, call: CallSpan, model: str) -> Span:
    """Return the server's span of a call."""
    attributes = (
        common_attributes(summary, model)
        | call.latencies
        | {
            "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
            "gen_ai.usage.output_tokens": summary.num_completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": summary.num_cached_tokens,
            "gen_ai.latency.e2e": summary.e2e_s,
            "http.response.status_code": summary.status,
            "url.path": summary.endpoint,
            "pdserve.request.id": summary.request_id,
        }
    )
    if summary.finish_reason is not None:
        attributes["gen_ai.response.finish_reasons"] = [summary.finish_reason]
    if summary.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = summary.ttft_s
    if summary.slo is not None:
        attributes["pdserve.slo_class"] = summary.slo.name
    name = f"{attributes['gen_ai.operation.name']} {summary.model or model}"
    start_s = summary.received_s
    end_s = start_s + summary.duration_s
    return Span(name, call, True, start_s, end_s, attributes, summary.error_code or "")


def common_attributes(summary: RequestSummary, model: str) -> Attributes:
    """Return what spans and metrics of a call have in common."""
    attributes: Attributes = {
        "gen_ai.operation.name": operation_of(summary.endpoint),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": summary.model or model,
        "gen_ai.response.model": summary.model or model,
    }
    if summary.error_code is not None:
        attributes["error.type"] = summary.error_code
    return attributes


def of_journey(journey: Journey, call: CallSpan) -> Iterator[Span]:
    """Yield a span for each phase of a request, and note their sums for the span of its call."""
    sums: dict[str, float] = {}
    for phase in phases(journey):
        if (latency := _LATENCIES.get(phase.name)) is not None:
            sums[latency] = sums.get(latency, 0.0) + phase.end_s - phase.start_s
        attributes: Attributes = {"pdserve.leg.id": journey.request_id}
        if phase.node:
            attributes["pdserve.node"] = phase.node
        yield Span(phase.name, call, False, phase.start_s, phase.end_s, attributes)
    for latency, seconds in sums.items():
        call.latencies[latency] = max(seconds, call.latencies.get(latency, 0.0))
