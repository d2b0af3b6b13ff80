"""Who is traced, what spans are called, and that they arrive at a collector."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace

from coordinator.api.observer import RequestSummary
from coordinator.requests.journey import Journey
from coordinator.tracing import make_tracing
from coordinator.tracing.call_histograms import BUCKETS, CallHistograms
from coordinator.tracing.call_span import CallSpan, begun
from coordinator.tracing.otlp import OtlpTracing
from coordinator.tracing.spans import of_call, operation_of
from pdserve.protocol import PhaseTimes, Slo
from pdserve.settings.tracing import TracingConfig
from pdserve.shared.clock import ManualClock
from tests.fakes.http import serving
from tests.otlp_receiver import attributes_of, receiving

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
KNOWN = f"00-{TRACE}-{PARENT}-01"


def summary(span: CallSpan | None = None, **changes: Any) -> RequestSummary:
    fields: dict[str, Any] = {
        "request_id": "req-1",
        "endpoint": "/v1/chat/completions",
        "slo": Slo(name="standard"),
        "is_streaming": True,
        "status": 200,
        "error_code": None,
        "finish_reason": "stop",
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_completion_tokens": 5,
        "e2e_s": 1.5,
        "ttft_s": 0.5,
        "tpot_s": 0.25,
        "received_s": 8.0,
        "duration_s": 2.0,
        "span": span,
    }
    return RequestSummary(**(fields | changes))


def test_a_caller_that_is_traced_decides() -> None:
    for share in (0.0, 1.0):
        call = begun({"traceparent": KNOWN, "tracestate": "a=b"}, share)
        assert call is not None
        assert (f"{call.trace_id:032x}", f"{call.parent_id:016x}") == (TRACE, PARENT)
        assert call.traceparent == f"00-{TRACE}-{call.span_id:016x}-01"
        assert call.state == "a=b"
        assert begun({"traceparent": KNOWN.removesuffix("01") + "00"}, share) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        f"ff-{TRACE}-{PARENT}-01",
        f"00-{'0' * 32}-{PARENT}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{PARENT}-01",
        f"{KNOWN}-more",
    ],
)
def test_what_is_malformed_is_as_good_as_none(text: str) -> None:
    assert begun({"traceparent": text}, 0.0) is None
    call = begun({"traceparent": text}, 1.0)
    assert call is not None
    assert call.parent_id == 0
    assert f"{call.trace_id:032x}" != TRACE


def test_a_newer_version_is_read_as_far_as_it_is_known() -> None:
    call = begun({"traceparent": f"01-{TRACE}-{PARENT}-01-more"}, 0.0)
    assert call is not None
    assert call.parent_id == int(PARENT, 16)


def test_so_many_are_sampled() -> None:
    num = sum(begun({}, 0.1) is not None for _ in range(5000))
    assert 350 < num < 650


@pytest.mark.parametrize(
    ("endpoint", "operation"),
    [
        ("/v1/chat/completions", "chat"),
        ("/v1/completions", "text_completion"),
        ("/v1/embeddings", "embeddings"),
        ("/v1/responses", "chat"),
    ],
)
def test_operations_have_the_names_of_the_conventions(endpoint: str, operation: str) -> None:
    assert operation_of(endpoint) == operation
    span = of_call(summary(endpoint=endpoint), CallSpan(1, 2, 0), "tiny")
    assert span.name == f"{operation} tiny"
    assert (span.start_s, span.end_s) == (8.0, 10.0)


def test_a_call_that_failed_says_how() -> None:
    failed = summary(status=502, error_code="node_lost", ttft_s=None, finish_reason=None)
    span = of_call(failed, CallSpan(1, 2, 0), "tiny")
    assert span.error == span.attributes["error.type"] == "node_lost"
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_without_a_collector_nothing_is_recorded() -> None:
    assert make_tracing(TracingConfig(), "tiny", ManualClock()) is None


async def test_spans_and_metrics_arrive_over_grpc() -> None:
    async with receiving() as (receiver, url):
        clock = ManualClock(100.0)
        tracing = OtlpTracing(TracingConfig(otlp_endpoint=url), "tiny", clock)
        tracing.listens_on("10.0.0.1", 8000)
        call = tracing.begin({"traceparent": KNOWN, "tracestate": "a=b"})
        assert call is not None
        tracing.journey_ended(_journey(call))
        tracing.call_ended(summary(call))
        tracing.call_ended(summary(None))
        await asyncio.to_thread(tracing.close)
    server, *parts = sorted(receiver.spans, key=lambda span: span.kind != 2)
    assert (server.name, server.kind, server.trace_state) == ("chat tiny", 2, "a=b")
    assert (server.trace_id.hex(), server.parent_span_id.hex()) == (TRACE, PARENT)
    assert server.span_id.hex() == f"{call.span_id:016x}"
    assert server.end_time_unix_nano - server.start_time_unix_nano == 2_000_000_000
    assert attributes_of(server) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pdserve",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "gen_ai.latency.e2e": 1.5,
        "gen_ai.latency.time_to_first_token": 0.5,
        "gen_ai.latency.time_in_queue": 0.25,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 0.5,
        "http.response.status_code": 200,
        "url.path": "/v1/chat/completions",
        "pdserve.request.id": "req-1",
        "pdserve.slo_class": "standard",
        "server.address": "10.0.0.1",
        "server.port": 8000,
    }
    assert [part.name for part in parts] == ["admission", "queue", "prefill", "resume", "decode"]
    assert {part.parent_span_id for part in parts} == {server.span_id}
    assert len({part.span_id for part in parts}) == len(parts)
    assert all(part.trace_id == server.trace_id for part in parts)
    assert attributes_of(parts[2]) == {"pdserve.leg.id": "r", "pdserve.node": "p"}
    points = dict(receiver.points())
    for name, buckets in BUCKETS.items():
        point = points[f"gen_ai.server.{name}"]
        assert point.count == 2, "also of calls that are not sampled"
        assert tuple(point.explicit_bounds) == buckets
    told = attributes_of(points["gen_ai.server.request.duration"])
    assert told["gen_ai.operation.name"] == "chat"
    assert "error.type" not in told


async def test_spans_arrive_over_http() -> None:
    bodies: dict[str, bytes] = {}

    async def take(request: web.Request) -> web.Response:
        bodies[request.path] = await request.read()
        return web.Response()

    routes = (web.post(f"/v1/{what}", take) for what in ("traces", "metrics"))
    async with serving(*routes) as url:
        config = TracingConfig(otlp_endpoint=url, otlp_protocol="http/protobuf", sampling=1.0)
        tracing = OtlpTracing(config, "tiny", ManualClock())
        tracing.call_ended(summary(tracing.begin({})))
        await asyncio.to_thread(tracing.close)
    assert set(bodies) == {"/v1/traces", "/v1/metrics"}
    (resource,) = trace.ExportTraceServiceRequest.FromString(bodies["/v1/traces"]).resource_spans
    assert attributes_of(resource.resource)["service.name"] == "pdserve"
    assert resource.scope_spans[0].spans[0].name == "chat tiny"


def test_calls_are_counted_by_operation_and_error_within_the_buckets_of_the_conventions() -> None:
    histograms = CallHistograms("tiny")
    for duration_s in (0.0, 0.01, 0.011, 100.0):
        histograms.add(summary(duration_s=duration_s), {"server.port": 8000})
    histograms.add(summary(error_code="node_lost", ttft_s=None, tpot_s=None), {})
    duration, first_token, per_token = (metric.data for metric in histograms.metrics())
    good, bad = duration.data_points
    assert list(good.bucket_counts) == [2, 1] + 12 * [0] + [1], "a bound is in the bucket below it"
    assert (good.count, good.sum, good.min, good.max) == (4, pytest.approx(100.021), 0.0, 100.0)
    assert good.attributes["server.port"] == 8000
    assert (bad.count, bad.attributes["error.type"]) == (1, "node_lost")
    assert [point.count for point in first_token.data_points] == [4]
    assert [point.count for point in per_token.data_points] == [4]


def _journey(call: CallSpan) -> Journey:
    journey = Journey("r", "standard", 10, received_s=98.0, started_s=98.25, span=call)
    journey.sent("p", "d", 98.5, is_resumed=False)
    journey.token_one(4, 99.0)
    journey.reported(PhaseTimes(prefill_s=0.5), "p")
    journey.interrupted("node_lost", 99.0)
    journey.sent("", "d2", 99.5, is_resumed=True)
    journey.reported(PhaseTimes(decode_s=0.5), "d2")
    journey.ended_s = 100.0
    return journey
