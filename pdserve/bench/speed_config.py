"""Configs of `pdserve bench step` and `pdserve bench serve`."""

from __future__ import annotations

from itertools import zip_longest
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.bench.serve.contestant import Contestant, parse_contestants
from pdserve.bench.serve.plan import Load, Plan
from pdserve.bench.step.cases import Grid
from pdserve.config import WHOLE, ConfigStruct, Count, EngineConfig, Seconds
from pdserve.errors import ConfigError

Rate = Annotated[float, Meta(gt=0)]

_USUAL_URL = "http://127.0.0.1:8000"

_QUICK_BATCHES = (1, 16)
_QUICK_CONTEXT = 1024  # tokens
_QUICK_PROMPT = 512  # tokens
_QUICK_BUDGET_S = 20.0


class StepBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench step`."""

    shape: Annotated[
        str, Meta(description="a named shape with random weights, or a checkpoint directory")
    ] = "160m"
    batches: Annotated[list[Count], Meta(description="decode batch sizes")] = msgspec.field(
        default_factory=lambda: [1, 4, 16, 64]
    )
    contexts: Annotated[
        list[Count], Meta(description="context lengths of decode steps, tokens")
    ] = msgspec.field(default_factory=lambda: [128, 1024, 4096])
    prompts: Annotated[
        list[Count], Meta(description="prompt lengths, each computed in one step")
    ] = msgspec.field(default_factory=lambda: [128, 512, 2048, 4096])
    budget_s: Annotated[Seconds, Meta(description="time to measure for; at least three rounds")] = (
        90.0
    )
    quick: Annotated[
        bool, Meta(description="batches 1 and 16, contexts up to 1024, prompts of 512; 20 s")
    ] = False
    beside: Annotated[
        int,
        Meta(ge=0, description="also measure beside this many processes, each half of a core busy"),
    ] = 0
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = EngineConfig()

    @property
    def grid(self) -> Grid:
        """What to measure, if there is room.

        Raises:
            ConfigError: a quick run leaves nothing.
        """
        if not self.quick:
            return Grid(self.batches, self.contexts, self.prompts)
        grid = Grid(
            [batch for batch in self.batches if batch in _QUICK_BATCHES],
            [context for context in self.contexts if context <= _QUICK_CONTEXT],
            [tokens for tokens in self.prompts if tokens == _QUICK_PROMPT],
        )
        if not list(grid.cases()):
            raise ConfigError("--quick measures none of these batches, contexts and prompts")
        return grid

    @property
    def seconds(self) -> float:
        """For measuring."""
        return min(self.budget_s, _QUICK_BUDGET_S) if self.quick else self.budget_s


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

    @property
    def urls(self) -> list[str]:
        """Servers that run already."""
        return self.url or ([] if self.against else [_USUAL_URL])

    @property
    def contestants(self) -> list[Contestant]:
        """All servers, if they are to be measured one after the other.

        Raises:
            ConfigError: one is not described as it must be.
        """
        if self.model and len(self.model) != len(self.url):
            raise ConfigError(
                f"{len(self.model)} models for {len(self.url)} urls: name one for each"
            )
        running = [
            Contestant(url, url=url, model=model)
            for url, model in zip_longest(self.url, self.model, fillvalue="")
        ]
        return [*running, *parse_contestants(self.against)]

    @property
    def plan(self) -> Plan:
        """What is sent.

        Raises:
            ConfigError: a load is named twice: its prompts would be known already.
        """
        loads = [Load(rate=rate) for rate in self.rate]
        loads = loads or [Load(concurrency=count) for count in self.concurrency]
        if len(set(loads)) < len(loads):
            raise ConfigError("--concurrency and --rate must not name a load twice")
        return Plan(
            loads=loads,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            num_requests=self.requests,
            rounds=self.rounds or (3 if len(self.urls) > 1 else 1),
            seed=self.seed,
            round_s=self.round_s,
        )
