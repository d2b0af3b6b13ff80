"""Config of `pdserve bench coordinator`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.bench.gateway_plan import Chats, GatewayPlan
from pdserve.config import ConfigStruct, Count, ModelConfig, Seconds

_QUICK_S = 2.0


class CoordinatorBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench coordinator`."""

    streams: Annotated[Count, Meta(description="concurrent streams at full load")] = 128
    step_ms: Annotated[
        float, Meta(gt=0, description="time between two tokens of a stream on a simulated node")
    ] = 4.0
    output_tokens: Annotated[
        list[Count], Meta(description="output lengths, measured one after the other")
    ] = msgspec.field(default_factory=lambda: [256, 2])
    prompt_words: Annotated[Count, Meta(description="prompt length")] = 64
    duration_s: Annotated[Seconds, Meta(description="duration of each load")] = 5.0
    rounds: Annotated[Count, Meta(description="rounds of each load")] = 2
    quick: Annotated[bool, Meta(description="one round of 2 s per load")] = False
    against: Annotated[
        str, Meta(description="URL of another gateway to measure in the same run")
    ] = ""
    against_model: Annotated[str, Meta(description="model name for that gateway")] = "simulated"
    against_pid: Annotated[
        int, Meta(ge=0, description="process id of that gateway, for its CPU time; 0: not measured")
    ] = 0
    upstream_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port of the simulated OpenAI API behind it; 0: any"),
    ] = 0
    drain_s: Annotated[
        Seconds, Meta(description="deadline for streams that still run when a load is over")
    ] = 60.0
    start_s: Annotated[Seconds, Meta(description="deadline for all processes to be ready")] = 60.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: ModelConfig = ModelConfig()

    @property
    def plan(self) -> GatewayPlan:
        """What is sent."""
        return GatewayPlan(
            cases=[
                Chats(f"{count} tokens", self.prompt_words, count) for count in self.output_tokens
            ],
            streams=self.streams,
            duration_s=min(self.duration_s, _QUICK_S) if self.quick else self.duration_s,
            drain_s=self.drain_s,
            rounds=1 if self.quick else self.rounds,
        )
