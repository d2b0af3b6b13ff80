"""A collector for OpenTelemetry that takes everything and keeps nothing, over gRPC.

So what traces cost is measured with what a process does to send them, and not with that for one
that nobody takes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from pdserve.shared.errors import ClusterError

_SERVICES = {
    "trace": "opentelemetry.proto.collector.trace.v1.TraceService",
    "metrics": "opentelemetry.proto.collector.metrics.v1.MetricsService",
}
_TAKEN = b""  # an answer without fields: all of it was taken


class OtlpCollector:
    """Counts the bytes of spans and of metrics that it was sent."""

    def __init__(self) -> None:
        self.num_bytes = dict.fromkeys(_SERVICES, 0)
        self.url = ""

    def handler(self, kind: str) -> grpc.GenericRpcHandler:
        """Return what takes one kind."""

        async def export(request: bytes, context: object) -> bytes:
            self.num_bytes[kind] += len(request)
            return _TAKEN

        return grpc.method_handlers_generic_handler(
            _SERVICES[kind], {"Export": grpc.unary_unary_rpc_method_handler(export)}
        )

    def check(self) -> None:
        """Check that there was something to measure. Raises ClusterError."""
        missing = [kind for kind, number in self.num_bytes.items() if not number]
        if missing:
            raise ClusterError(f"no {' and no '.join(missing)} arrived at the collector")


@asynccontextmanager
async def collecting() -> AsyncIterator[OtlpCollector]:
    """Listen on this machine."""
    server, collector = grpc.aio.server(), OtlpCollector()
    server.add_generic_rpc_handlers([collector.handler(kind) for kind in _SERVICES])
    collector.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(0.1)
