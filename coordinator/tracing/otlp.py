"""Sends spans and GenAI metrics to an OpenTelemetry collector, from threads.

Spans are made as the SDK's finished ones: their ids, and the times at which they began and ended,
are known before. What the collector does not take in time is dropped.
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import pdserve
from coordinator.api.observer import RequestSummary
from coordinator.requests.journey import Journey
from coordinator.tracing.call_histograms import CallHistograms, MetricsSender
from coordinator.tracing.call_span import CallSpan, begun
from coordinator.tracing.spans import Attributes, Span, of_call, of_journey
from pdserve.settings.tracing import TracingConfig
from pdserve.shared.clock import Clock

with suppress(ImportError):  # the extra; `make_tracing` says so if it is needed
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
    from opentelemetry.trace.status import Status, StatusCode

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

_SEND_S: Final = 5.0  # until a collector has to have taken what is sent


class OtlpTracing:
    """Records calls and their requests. No method but `close` blocks."""

    def __init__(self, config: TracingConfig, model: str, clock: Clock) -> None:
        self._share = config.sampling
        self._model = model
        self._clock = clock
        self._server: Attributes = {}
        resource = Resource.create(
            {
                "service.name": "pdserve",
                "service.version": pdserve.__version__,
                "service.instance.id": str(uuid4()),
            }
        )
        spans, metrics = _exporters(config)
        self._resource = resource
        self._scope = InstrumentationScope("pdserve", pdserve.__version__)
        self._processor = BatchSpanProcessor(spans)
        self._histograms = CallHistograms(model)
        self._sender = MetricsSender(
            metrics, self._histograms, resource, self._scope, config.metrics_s
        )

    def listens_on(self, host: str, port: int) -> None:
        """Where the calls arrive from now on."""
        self._server = {"server.address": host, "server.port": port}

    def begin(self, headers: Mapping[str, str]) -> CallSpan | None:
        """Begin a call; None: its spans are not recorded."""
        return begun(headers, self._share)

    def call_ended(self, summary: RequestSummary) -> None:
        """A call has ended, whether its spans are recorded or not."""
        self._histograms.add(summary, self._server)
        if summary.span is not None:
            self._send(of_call(summary, summary.span, self._model))

    def journey_ended(self, journey: Journey) -> None:
        """A request of a call has ended: before the call itself."""
        if journey.span is not None:
            for span in of_journey(journey, journey.span):
                self._send(span)

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._processor.force_flush(round(_SEND_S * 1e3))
        self._processor.shutdown()  # type: ignore[no-untyped-call]
        self._sender.close(_SEND_S)

    def _send(self, span: Span) -> None:
        call = span.call
        own_id = call.span_id if span.is_server else random.getrandbits(64) or 1
        parent_id = call.parent_id if span.is_server else call.span_id
        since_epoch_s = time.time() - self._clock.now()
        failed = Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET)
        attributes = span.attributes | self._server if span.is_server else span.attributes
        self._processor.on_end(
            ReadableSpan(
                span.name,
                self._context(call, own_id, is_remote=False),
                self._context(call, parent_id, is_remote=span.is_server) if parent_id else None,
                self._resource,
                attributes,
                kind=SpanKind.SERVER if span.is_server else SpanKind.INTERNAL,
                status=failed,
                start_time=round((span.start_s + since_epoch_s) * 1e9),
                end_time=round((span.end_s + since_epoch_s) * 1e9),
                instrumentation_scope=self._scope,
            )
        )

    def _context(self, call: CallSpan, span_id: int, *, is_remote: bool) -> SpanContext:
        state = TraceState.from_header([call.state]) if call.state else None
        return SpanContext(call.trace_id, span_id, is_remote, TraceFlags(TraceFlags.SAMPLED), state)


def _exporters(config: TracingConfig) -> tuple[SpanExporter, MetricExporter]:
    """Return what sends spans and metrics, over the transport that the collector speaks."""
    url = config.otlp_endpoint
    if config.otlp_protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(url, timeout=_SEND_S), OTLPMetricExporter(url, timeout=_SEND_S)
    from opentelemetry.exporter.otlp.proto.http import metric_exporter, trace_exporter

    base = url.rstrip("/")
    return (
        trace_exporter.OTLPSpanExporter(f"{base}/v1/traces", timeout=_SEND_S),
        metric_exporter.OTLPMetricExporter(f"{base}/v1/metrics", timeout=_SEND_S),
    )
