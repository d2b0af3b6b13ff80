"""What `pdserve bench compare` can be told."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.bench.checkpoint_shapes import SHAPES
from pdserve.bench.compare_plan import ComparePlan, Tuning
from pdserve.bench.scenarios import ScenarioName
from pdserve.config import (
    ConfigStruct,
    Count,
    EngineConfig,
    Mode,
    PolicyConfig,
    Seconds,
    TransportName,
)
from pdserve.errors import ConfigError

_QUICK_RUN_S = 8.0
_QUICK_IDLE = 5
_QUICK_BUDGET_S = 560.0
_QUICK_CHUNKS: Final = (0,)
_LEAST_REQUESTS = 200  # of a run; fewer say little
_QUICK_REQUESTS = 54
_WARM_UP = 3  # requests after each start of a cluster

Scale = Annotated[float, Meta(ge=0)]


class CompareConfig(ConfigStruct, frozen=True):
    """Ways of serving, on the same cores and the same requests."""

    scenarios: Annotated[list[ScenarioName], Meta(description="made-up workloads, by name")] = (
        msgspec.field(default_factory=lambda: ["long-prompts", "short-prompts"])
    )
    trace: Annotated[
        str, Meta(description="replay this instead: Mooncake's JSON lines, or Azure's CSV")
    ] = ""
    modes: Annotated[list[Mode], Meta(description="to compare")] = msgspec.field(
        default_factory=lambda: ["disaggregated", "colocated", "adaptive"]
    )
    prefill: Annotated[Count, Meta(description="prefill nodes, unless co-located")] = 1
    decode: Annotated[Count, Meta(description="decode nodes; all are when co-located")] = 1
    model: Annotated[
        str, Meta(description="checkpoint directory or hub id; empty: random weights, made here")
    ] = ""
    shape: Annotated[str, Meta(description=f"of the random weights: {', '.join(SHAPES)}")] = "50m"
    rates: Annotated[
        list[Seconds], Meta(description="requests a second; empty: around what modes take")
    ] = msgspec.field(default_factory=list)
    most_rates: Annotated[Count, Meta(description="that are measured, if time allows")] = 9
    duration_s: Annotated[Seconds, Meta(description="of each run")] = 30.0
    ttft_s: Annotated[Scale, Meta(description="promised; 0: a multiple of an idle cluster's")] = 0.0
    tpot_s: Annotated[Scale, Meta(description="promised; 0: a multiple of an idle cluster's")] = 0.0
    ttft_scale: Annotated[Scale, Meta(description="that multiple; 0: the scenario's")] = 0.0
    tpot_scale: Annotated[Scale, Meta(description="that multiple; 0: the scenario's")] = 0.0
    target: Annotated[
        float, Meta(gt=0, le=1, description="share of requests that must be in time")
    ] = 0.9
    chunks: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(min_length=1, description="local chunks tried when co-located; 0: as TPOT allows"),
    ] = msgspec.field(default_factory=lambda: [0, 64, 128, 256, 512])
    one_node: Annotated[bool, Meta(description="try co-location in one node of all cores, too")] = (
        True
    )
    length_scale: Annotated[
        Scale, Meta(description="times all lengths; 0: so that they fit the model")
    ] = 0.0
    admission: Annotated[bool, Meta(description="let coordinators refuse what would be late")] = (
        False
    )
    idle_requests: Annotated[Count, Meta(description="to each idle cluster")] = 20
    seed: Annotated[int, Meta(ge=0, description="of everything random")] = 0
    budget_s: Annotated[Seconds, Meta(description="no rate is begun that would end later")] = 3600.0
    quick: Annotated[
        bool, Meta(description="within ten minutes: short runs, chunks as TPOT allows")
    ] = False
    out: Annotated[str, Meta(description="folder for plots, report and raw results")] = (
        "bench-compare"
    )
    transports: Annotated[
        list[TransportName], Meta(description="for KV, best first; empty: all that are of use here")
    ] = msgspec.field(default_factory=list)
    json: Annotated[bool, Meta(description="for programs")] = False
    engine: EngineConfig = EngineConfig()
    policy: PolicyConfig = PolicyConfig()

    @property
    def plan(self) -> ComparePlan:
        """How much is measured; less of it if it must be quick.

        Raises:
            ConfigError: a mode or scenario is named twice, rates do not rise, or no such shape.
        """
        for flag, names in (("--modes", self.modes), ("--scenarios", self.scenarios)):
            if len(set(names)) < len(names):
                raise ConfigError(f"{flag} {','.join(names)}: each can be named once")
        if self.shape not in SHAPES:
            raise ConfigError(f'--shape "{self.shape}": there are {", ".join(SHAPES)}')
        if sorted(set(self.rates)) != self.rates:
            raise ConfigError(f"--rates {','.join(map(str, self.rates))}: must rise")
        quick = self.quick
        chunks = self.chunks
        if quick:
            chunks = [chunk for chunk in chunks if chunk in _QUICK_CHUNKS] or chunks[:1]
        layouts = (False, True) if self.one_node else (False,)
        return ComparePlan(
            modes=self.modes,
            tunings=[Tuning(chunk, one_node) for one_node in layouts for chunk in chunks],
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            ttft_scale=self.ttft_scale,
            tpot_scale=self.tpot_scale,
            target=self.target,
            seed=self.seed,
            rates=self.rates,
            most_rates=max(self.most_rates, len(self.rates)),
            duration_s=min(self.duration_s, _QUICK_RUN_S) if quick else self.duration_s,
            least_requests=_QUICK_REQUESTS if quick else _LEAST_REQUESTS,
            idle_requests=min(self.idle_requests, _QUICK_IDLE) if quick else self.idle_requests,
            warm_up=_WARM_UP,
            budget_s=min(self.budget_s, _QUICK_BUDGET_S) if quick else self.budget_s,
        )
