"""Traces of requests, for OpenTelemetry: the optional extra `otel`.

    call_span.py  the span of a call: W3C trace context in and out, and who is sampled
    spans.py      a call and the journeys of its requests as spans, once they have ended
    otlp.py       sends them, and GenAI metrics, to a collector; all that imports opentelemetry

Nothing is instrumented: spans are made of what is known of a request when it has ended. A request
that is not sampled costs a comparison, and without a collector nothing does.
"""
