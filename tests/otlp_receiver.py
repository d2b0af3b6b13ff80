"""A collector that keeps what it gets, over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2 as metrics
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2_grpc as metrics_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as trace_grpc

WITHIN_S = 20.0


def attributes_of(entry: Any) -> dict[str, Any]:
    """The attributes of a span, a data point or a resource, as Python's values."""
    return {one.key: _value(one.value) for one in entry.attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, kind)


class Receiver(trace_grpc.TraceServiceServicer, metrics_grpc.MetricsServiceServicer):
    """Spans and metrics, in the order in which they came."""

    def __init__(self) -> None:
        self.traces: list[trace.ExportTraceServiceRequest] = []
        self.metrics: list[metrics.ExportMetricsServiceRequest] = []
        self._news = asyncio.Event()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.traces
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def points(self) -> Iterator[tuple[str, Any]]:
        """Each histogram's name and data point."""
        for request in self.metrics:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        for point in metric.histogram.data_points:
                            yield metric.name, point

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait for what is on its way."""
        async with asyncio.timeout(WITHIN_S):
            while not is_so():
                await self._news.wait()
                self._news.clear()

    async def Export(self, request: Any, context: object) -> Any:  # noqa: N802
        """Take spans or metrics: both services have a method of this name."""
        self._news.set()
        if isinstance(request, trace.ExportTraceServiceRequest):
            self.traces.append(request)
            return trace.ExportTraceServiceResponse()
        self.metrics.append(request)
        return metrics.ExportMetricsServiceResponse()


@asynccontextmanager
async def receiving() -> Any:
    """A receiver, and the URL at which it listens."""
    server, receiver = grpc.aio.server(), Receiver()
    trace_grpc.add_TraceServiceServicer_to_server(receiver, server)
    metrics_grpc.add_MetricsServiceServicer_to_server(receiver, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield receiver, f"http://127.0.0.1:{port}"
    finally:
        await server.stop(0.1)
