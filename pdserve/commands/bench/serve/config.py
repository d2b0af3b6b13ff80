"""Config of `pdserve bench serve`, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.commands.bench.serve.backend import Backend, parse_backends
from pdserve.settings.config import WHOLE
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.shared.errors import ConfigError
from pdserve.shared.hints.urls import check_url

Rate = Annotated[float, Meta(gt=0)]

_USUAL_URL = "http://127.0.0.1:8000"


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop of `concurrency` streams or, if that is 0, an open loop at `rate`."""

    concurrency: int = 0
    rate: float = 0.0  # requests per second

    def __str__(self) -> str:
        return f"{self.concurrency} at a time" if self.concurrency else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class ServePlan:
    """The load of a measurement."""

    loads: Sequence[Load]
    prompt_tokens: int
    output_tokens: int
    num_requests: int  # per round; 0: derived from the load
    rounds: int
    seed: int
    round_s: float  # limit of a closed-loop round; of an open-loop one, after its last arrival


class ServeBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench serve`."""

    url: Annotated[
        list[str],
        Meta(
            description="OpenAI-compatible servers, compared if several; key: PDSERVE_API_KEY "
            f"(default: {_USUAL_URL}, unless --against)",
        ),
    ] = msgspec.field(default_factory=list)
    against: Annotated[
        list[str],
        Meta(
            description="a server that takes turns with others (may be repeated): NAME=URL, "
            "NAME=COMMAND with {model}, {port} and {threads}, vllm=VENV, llama.cpp=LLAMA_SERVER, "
            "pdserve=FLAGS",
            extra=WHOLE,
        ),
    ] = msgspec.field(default_factory=list)
    shape: Annotated[
        str,
        Meta(description="{model} of commands: random weights, or a checkpoint directory"),
    ] = "160m"
    threads: Annotated[int, Meta(ge=0, description="{threads} of commands; 0: one per core")] = 0
    start_s: Annotated[
        Seconds, Meta(description="deadline until a server that was started is ready")
    ] = 600.0
    model: Annotated[
        list[str],
        Meta(description="model names, one per URL; empty: the first that a server lists"),
    ] = msgspec.field(default_factory=list)
    concurrency: Annotated[
        list[Count], Meta(description="closed loops: streams at a time; ignored with --rate")
    ] = msgspec.field(default_factory=lambda: [1, 4, 16])
    rate: Annotated[
        list[Rate], Meta(description="open loops: requests per second, Poisson arrivals")
    ] = msgspec.field(default_factory=list)
    prompt_tokens: Annotated[Count, Meta(description="prompt length")] = 512
    output_tokens: Annotated[Count, Meta(description="output length")] = 64
    requests: Annotated[
        int,
        Meta(
            ge=0,
            description="requests per round; 0: 4 per stream and at least 8, or 32 with --rate",
        ),
    ] = 0
    rounds: Annotated[
        int, Meta(ge=0, description="rounds per load; 0: 1, or 3 with several URLs")
    ] = 0
    seed: Annotated[int, Meta(ge=0, description="random seed of prompts and arrivals")] = 0
    round_s: Annotated[
        Seconds, Meta(description="deadline of a closed-loop round, or after the last arrival")
    ] = 600.0
    json: Annotated[bool, Meta(description="print JSON")] = False

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if one is no address."""
        for url in self.url:
            check_url(url)

    @property
    def urls(self) -> list[str]:
        """Servers that run already."""
        return self.url or ([] if self.against else [_USUAL_URL])

    @property
    def backends(self) -> list[Backend]:
        """All servers, if they are to be measured one after the other.

        Raises:
            ConfigError: one is not described as it must be.
        """
        if self.model and len(self.model) != len(self.url):
            raise ConfigError(
                f"{len(self.model)} models for {len(self.url)} urls: name one for each"
            )
        running = [
            Backend(url, url=url, model=model)
            for url, model in zip_longest(self.url, self.model, fillvalue="")
        ]
        return [*running, *parse_backends(self.against)]

    @property
    def plan(self) -> ServePlan:
        """What is sent.

        Raises:
            ConfigError: a load is named twice: its prompts would be known already.
        """
        loads = [Load(rate=rate) for rate in self.rate]
        loads = loads or [Load(concurrency=count) for count in self.concurrency]
        if len(set(loads)) < len(loads):
            raise ConfigError("--concurrency and --rate must not name a load twice")
        return ServePlan(
            loads=loads,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            num_requests=self.requests,
            rounds=self.rounds or (3 if len(self.urls) > 1 else 1),
            seed=self.seed,
            round_s=self.round_s,
        )
