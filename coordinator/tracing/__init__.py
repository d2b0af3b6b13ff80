"""Traces of requests, for OpenTelemetry: the optional extra `otel`.

    call_span.py         the span of a call: W3C trace context in and out, and who is sampled
    spans.py             a call and the journeys of its requests as spans, once they have ended
    call_histograms.py   GenAI metrics of all calls, counted and sent at intervals
    otlp.py              sends spans to a collector, and has metrics sent

Nothing is instrumented: spans are made of what is known of a request when it has ended. A request
that is not sampled costs a comparison and three additions, and without a collector nothing does.
"""
