"""Config of `pdserve bench coordinator`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.bench.gateway_plan import Chats, GatewayPlan
from pdserve.bench.serve_plan import Load
from pdserve.config import ConfigStruct, Count, ModelConfig, Seconds
from pdserve.errors import ConfigError

_QUICK_S = 2.0


class CoordinatorBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench coordinator`."""

    streams: Annotated[Count, Meta(description="of a closed loop, which is full load")] = 128
    step_ms: Annotated[
        float, Meta(gt=0, description="between two tokens of a stream, as simulated nodes have it")
    ] = 4.0
    output_tokens: Annotated[
        list[Count], Meta(description="of an answer at full load; each is measured by itself")
    ] = msgspec.field(default_factory=lambda: [256, 2])
    rate: Annotated[
        float, Meta(ge=0, description="requests/s of an open loop, for added TTFT; 0: none")
    ] = 250.0
    rate_tokens: Annotated[Count, Meta(description="of an answer at that rate")] = 40
    prompt_words: Annotated[Count, Meta(description="of each prompt")] = 64
    duration_s: Annotated[Seconds, Meta(description="of each load")] = 5.0
    rounds: Annotated[Count, Meta(description="of each load")] = 3
    quick: Annotated[bool, Meta(description="one round, and 2 s a load")] = False
    against: Annotated[
        str, Meta(description="URL of another gateway, to be measured in the same run")
    ] = ""
    against_model: Annotated[str, Meta(description="what to ask it for")] = "simulated"
    against_pid: Annotated[
        int, Meta(ge=0, description="its process, for what it computes; 0: only by time")
    ] = 0
    upstream_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="where a simulated OpenAI API stands behind it; 0: any"),
    ] = 0
    drain_s: Annotated[Seconds, Meta(description="for what still runs when a load is over")] = 60.0
    start_s: Annotated[Seconds, Meta(description="for everything to be ready")] = 60.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: ModelConfig = ModelConfig()

    @property
    def plan(self) -> GatewayPlan:
        """What is sent.

        Raises:
            ConfigError: nothing is.
        """
        words, full = self.prompt_words, Load(concurrency=self.streams)
        cases = [Chats(words, count, full) for count in self.output_tokens]
        if self.rate:
            cases.append(Chats(words, self.rate_tokens, Load(rate=self.rate)))
        if not cases:
            raise ConfigError("there is nothing to measure: give --output-tokens, --rate or both")
        return GatewayPlan(
            cases=cases,
            duration_s=min(self.duration_s, _QUICK_S) if self.quick else self.duration_s,
            drain_s=self.drain_s,
            rounds=1 if self.quick else self.rounds,
        )
