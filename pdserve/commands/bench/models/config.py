"""Config of `pdserve bench models`."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.commands.bench.load.outcome import Percentiles
from pdserve.commands.bench.serve.backend import Backend, parse_backends
from pdserve.settings.config import WHOLE
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.shared.errors import ConfigError

# Known commands. {folder} has models.toml and, below gguf, the same models; {given} is what follows
# the name.
RECIPES: Final = {
    # What it packs goes with the folder. {given} are options of `pdserve up`.
    "pdserve": f"env XDG_CACHE_HOME={{folder}}/cache {shlex.quote(sys.executable)} -m pdserve up "
    "--models {folder}/models.toml --port {port} {given}",
    # The path of llama.cpp's `llama-server`, which as a router starts one for each model.
    "llama.cpp": "{given} --models-dir {folder}/gguf --models-max {awake} --host 127.0.0.1 "
    "--port {port} --threads {threads} --threads-batch {threads} --parallel 4 --ctx-size 8192",
}
OURS: Final = "pdserve=--mode colocated"


class ModelsBenchConfig(ConfigStruct, frozen=True):
    """Config of `pdserve bench models`."""

    shape: Annotated[str, Meta(description="of all models, whose weights are random")] = "160m"
    models: Annotated[int, Meta(ge=2, le=64, description="models behind one endpoint")] = 8
    awake: Annotated[int, Meta(ge=1, le=16, description="of which so many are at once")] = 2
    against: Annotated[
        list[str],
        Meta(
            description="a server that takes turns with pdserve (may be repeated): "
            "llama.cpp=LLAMA_SERVER, or NAME=COMMAND with {folder}, {awake}, {port} and {threads}",
            extra=WHOLE,
        ),
    ] = msgspec.field(default_factory=list)
    threads: Annotated[int, Meta(ge=0, description="{threads} of commands; 0: one per core")] = 0
    wakes: Annotated[Count, Meta(description="requests, each to a model that sleeps")] = 12
    pause_s: Annotated[Seconds, Meta(description="from the end of one of these to the next")] = 1.0
    mix_s: Annotated[Seconds, Meta(description="of requests to models by Zipf's law")] = 20.0
    streams: Annotated[Count, Meta(description="of these, at a time")] = 4
    prompt_tokens: Annotated[Count, Meta(description="prompt length")] = 64
    output_tokens: Annotated[Count, Meta(description="output length")] = 16
    seed: Annotated[int, Meta(ge=0, description="random seed of prompts and of the mix")] = 0
    start_s: Annotated[
        Seconds, Meta(description="deadline until a server is ready, and for each first answer")
    ] = 120.0
    request_s: Annotated[Seconds, Meta(description="deadline of each further request")] = 30.0
    json: Annotated[bool, Meta(description="print JSON")] = False

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if none has to sleep."""
        if self.awake >= self.models:
            raise ValueError(f"awake: {self.awake} of {self.models} models: none would sleep")

    @property
    def names(self) -> list[str]:
        """The models, those first that the mix asks for most."""
        return [f"m{number}" for number in range(self.models)]

    @property
    def backends(self) -> list[Backend]:
        """pdserve, and the others. Raises ConfigError: one is not described as it must be."""
        found = parse_backends([OURS, *self.against], RECIPES)
        if urls := [one.url for one in found if one.url]:
            raise ConfigError(f"{urls[0]}: give a command, since its models are made here")
        return found


class ModelsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One server. Percentiles in milliseconds."""

    server: str
    wake_ttft_ms: Percentiles  # of requests to models that sleep, one at a time
    mix_tokens_per_s: float
    mix_ttft_ms: Percentiles
    mix_e2e_ms: Percentiles
    sent: int
    failed: int  # refused, failed, or without a token in time
    errors: dict[str, int]  # error |-> count


class ModelsReport(msgspec.Struct, frozen=True):
    """The results of `pdserve bench models`."""

    rows: list[ModelsRow]
    load_average: float
