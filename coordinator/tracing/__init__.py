"""Traces of requests, for OpenTelemetry: the optional extra `otel`.

    call_span.py         the span of a call: W3C trace context in and out, and who is sampled
    spans.py             a call and the journeys of its requests as spans, once they have ended
    call_histograms.py   GenAI metrics of all calls, counted and sent at intervals
    otlp.py              sends spans to a collector, and has metrics sent

Nothing is instrumented: spans are made of what is known of a request when it has ended. A request
that is not sampled costs a comparison and three additions, and without a collector nothing does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdserve.settings.tracing import TracingConfig
from pdserve.shared.clock import Clock
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.extras import how_to_install

if TYPE_CHECKING:
    from coordinator.tracing.otlp import OtlpTracing


def make_tracing(config: TracingConfig, model: str, clock: Clock) -> OtlpTracing | None:
    """Return what records calls; None: there is no collector, and nothing of the extra is loaded.

    Raises:
        ConfigError: a collector is given, but the extra `otel` is not installed.
    """
    if not config.otlp_endpoint:
        return None
    try:
        import opentelemetry.sdk.trace  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"tracing.otlp_endpoint needs an extra: {how_to_install('otel')} ({error})"
        ) from error
    from coordinator.tracing.otlp import OtlpTracing

    return OtlpTracing(config, model, clock)
