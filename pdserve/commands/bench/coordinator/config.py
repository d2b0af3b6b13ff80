"""Config of `pdserve bench coordinator`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.commands.bench.serve.config import Load
from pdserve.settings.config import CheckpointConfig
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.shared.errors import ConfigError

_QUICK_S = 2.0


@dataclass(frozen=True, slots=True)
class Chats:
    """The requests of a load, and how often they are sent."""

    prompt_words: int
    output_tokens: int
    load: Load

    def __str__(self) -> str:
        return f"answers of {self.output_tokens}, {self.load}"


@dataclass(frozen=True, slots=True)
class CoordinatorPlan:
    """All loads of a measurement."""

    cases: Sequence[Chats]
    duration_s: float  # of a load
    drain_s: float  # time for running requests after a load
    rounds: int


class CoordinatorBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench coordinator`."""

    streams: Annotated[Count, Meta(description="streams at a time in a closed loop")] = 128
    step_ms: Annotated[
        float, Meta(gt=0, description="time between two tokens of a simulated node's stream")
    ] = 4.0
    output_tokens: Annotated[
        list[Count], Meta(description="answer lengths in the closed loop, each a load of its own")
    ] = msgspec.field(default_factory=lambda: [256, 2])
    rate: Annotated[
        float, Meta(ge=0, description="requests/s of the open loop that measures TTFT; 0: none")
    ] = 250.0
    rate_tokens: Annotated[Count, Meta(description="answer length in the open loop")] = 40
    prompt_words: Annotated[Count, Meta(description="words per prompt")] = 64
    duration_s: Annotated[Seconds, Meta(description="duration of each load")] = 5.0
    rounds: Annotated[Count, Meta(description="repetitions of each load")] = 3
    quick: Annotated[bool, Meta(description="one round, and 2 s per load")] = False
    against: Annotated[
        str, Meta(description="URL of another server to measure in the same run")
    ] = ""
    against_model: Annotated[str, Meta(description="name of its model")] = "simulated"
    against_pid: Annotated[
        int, Meta(ge=0, description="its process id, to measure its CPU time; 0: do not")
    ] = 0
    traced: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of requests that a second coordinator traces, which is measured in "
            "turns with the first; 0: there is none",
        ),
    ] = 0.0
    upstream_port: Annotated[
        int,
        Meta(ge=0, le=65535, description="port of the simulated OpenAI API behind it; 0: any"),
    ] = 0
    drain_s: Annotated[Seconds, Meta(description="time for streams to end after a load")] = 60.0
    start_s: Annotated[Seconds, Meta(description="deadline for everything to be ready")] = 60.0
    json: Annotated[bool, Meta(description="print JSON")] = False
    checkpoint: CheckpointConfig = CheckpointConfig()

    @property
    def plan(self) -> CoordinatorPlan:
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
        return CoordinatorPlan(
            cases=cases,
            duration_s=min(self.duration_s, _QUICK_S) if self.quick else self.duration_s,
            drain_s=self.drain_s,
            rounds=1 if self.quick else self.rounds,
        )
