"""Where traces go, and how many."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct, Seconds


class TracingConfig(ConfigStruct, frozen=True):
    """Traces and metrics for OpenTelemetry."""

    otlp_endpoint: Annotated[
        str,
        Meta(description='URL of a collector, such as "http://127.0.0.1:4317"; empty: no traces'),
    ] = ""
    otlp_protocol: Annotated[
        Literal["grpc", "http/protobuf"], Meta(description="what the collector speaks at that URL")
    ] = "grpc"
    sampling: Annotated[
        float, Meta(ge=0, le=1, description="share of requests traced whose caller did not decide")
    ] = 0.1
    metrics_s: Annotated[Seconds, Meta(description="interval at which GenAI metrics are sent")] = (
        60.0
    )
