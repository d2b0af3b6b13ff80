"""Config of `pdserve bench compare`, and what it comes to.

Light to import: every `pdserve` command loads it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Final, get_args

import msgspec
from msgspec import Meta

from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.commands.bench.compare.policies import PolicyContestant
from pdserve.commands.bench.load.promises import Scale, TpotPromise, TtftPromise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.commands.bench.serve.backend import Backend, parse_backends
from pdserve.settings.config import WHOLE, EngineConfig, Mode, PolicyConfig, Transports
from pdserve.settings.flag_groups import Groups
from pdserve.settings.speculation import SpeculationConfig
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.settings.values import check_equal_pools
from pdserve.shared.errors import ConfigError
from pdserve.shared.simulated_link import check_links

COLOCATED: Final[Mode] = "colocated"

_QUICK_RUN_S = 5.0
_QUICK_IDLE = 5
_QUICK_BUDGET_S = 560.0
_QUICK_CHUNKS: Final = (0,)
_LEAST_REQUESTS = 200  # of a run; fewer say little
_QUICK_REQUESTS = 40
_MOST_REQUESTS = 50_000  # of a run: all its prompts are made before it
_WARM_UP = 3  # requests after each start of a cluster


_FLAGS: Final[Groups] = {
    "what": ("modes", "policies", "against", "scenarios", "trace", "prefill", "decode", "links"),
    "model": ("model", "shape", "device", "threads"),
    "promises": ("ttft_s", "tpot_s", "target"),
    "how long": ("quick", "budget_s", "duration_s", "rates"),
    "results": ("out", "from_", "json"),
}


class Tuning(msgspec.Struct, frozen=True):
    """One way to set up the co-located mode."""

    local_chunk: int  # most prompt tokens in a step with decodes; 0: what the TPOT allows
    one_node: bool = False  # one node with all cores, else as many nodes as other modes

    @property
    def text(self) -> str:
        """Description for people: "one node, chunks as TPOT allows"."""
        chunks = f"chunks of {self.local_chunk}" if self.local_chunk else "chunks as TPOT allows"
        return f"{'one node' if self.one_node else 'several nodes'}, {chunks}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparePlan:
    """What a comparison measures, and for how long."""

    modes: Sequence[str]  # and the names of policies and other servers
    tunings: Sequence[Tuning]  # to try when co-located; at least one
    ttft_s: float  # TTFT target; 0: derived from the idle clusters,
    tpot_s: float
    ttft_scale: float  # as a multiple of their latencies; 0: the case's own
    tpot_scale: float
    target: float
    seed: int
    rates: Sequence[float]  # ascending; empty: chosen by `rates.next_rate`
    duration_s: float  # of each run, at least
    least_requests: int  # of each run
    idle_requests: int  # least number sent to an idle cluster
    warm_up: int  # requests after each start
    budget_s: float  # for everything
    is_quick: bool = False  # nothing but goodput is measured
    shortens: bool = False  # lengths, where the machine has no time for so long requests


class CompareConfig(ConfigStruct, frozen=True):
    """Modes, policies and other servers, on the same cores and the same requests."""

    scenarios: Annotated[list[ScenarioName], Meta(description="built-in workloads")] = (
        msgspec.field(default_factory=lambda: ["long-prompts", "short-prompts"])
    )
    trace: Annotated[
        str, Meta(description="replay this trace instead: of pdserve record, Mooncake or Azure")
    ] = ""
    modes: Annotated[list[Mode], Meta(description="modes to compare")] = msgspec.field(
        default_factory=lambda: ["disaggregated", "colocated", "adaptive"]
    )
    policies: Annotated[
        list[str],
        Meta(
            description="the first mode with other policies, too: names of prefill policies, "
            "decode policies and routers, joined by + where several make one contestant"
        ),
    ] = msgspec.field(default_factory=list)
    against: Annotated[
        list[str],
        Meta(
            description="another server (may be repeated): NAME=URL, or NAME=COMMAND with {model}, "
            "{port} and {threads}; vllm=VENV, llama.cpp=LLAMA_SERVER",
            extra=WHOLE,
        ),
    ] = msgspec.field(default_factory=list)
    prefill: Annotated[Count, Meta(description="number of prefill nodes, unless colocated")] = 1
    decode: Annotated[
        Count,
        Meta(
            description="number of decode nodes; in colocated mode all nodes are; in multiplexed "
            "mode one of each is a node"
        ),
    ] = 1
    model: Annotated[
        str, Meta(description="checkpoint directory or hub id; empty: random weights")
    ] = ""
    shape: Annotated[str, Meta(description=f"shape of the random weights: {', '.join(SHAPES)}")] = (
        "50m"
    )
    rates: Annotated[
        list[Seconds],
        Meta(description="request rates, per second; empty: found around the modes' capacity"),
    ] = msgspec.field(default_factory=list)
    duration_s: Annotated[Seconds, Meta(description="duration of each run")] = 30.0
    ttft_s: TtftPromise = 0.0
    tpot_s: TpotPromise = 0.0
    ttft_scale: Annotated[Scale, Meta(description="that multiple; 0: as the scenario says")] = 0.0
    tpot_scale: Annotated[Scale, Meta(description="that multiple; 0: as the scenario says")] = 0.0
    target: Annotated[
        float, Meta(gt=0, le=1, description="share of requests that must meet both promises")
    ] = 0.9
    chunks: Annotated[
        list[Annotated[int, Meta(ge=0)]],
        Meta(min_length=1, description="values of policy.local_chunk to try in colocated mode"),
    ] = msgspec.field(default_factory=lambda: [0, 64, 128, 256, 512])
    one_node: Annotated[
        bool, Meta(description="also try colocated mode as one node with all cores")
    ] = True
    length_scale: Annotated[
        Scale, Meta(description="factor on all lengths; 0: chosen to fit the model")
    ] = 0.0
    admission: Annotated[
        bool, Meta(description="let the coordinators refuse requests that would be late")
    ] = False
    idle_requests: Annotated[Count, Meta(description="requests to each idle cluster")] = 20
    seed: Annotated[int, Meta(ge=0, description="random seed")] = 0
    budget_s: Annotated[
        Seconds,
        Meta(description="time limit: but for the first, no rate is begun that would end later"),
    ] = 3600.0
    quick: Annotated[
        bool, Meta(description="ten minutes at most: short runs, one local chunk, goodput alone")
    ] = False
    out: Annotated[
        str,
        Meta(description="new directory for plots and results; empty: bench-compare/TIME"),
    ] = ""
    from_: Annotated[
        str,
        Meta(description="measure nothing: compute the report of this directory's results anew"),
    ] = ""
    links: Annotated[
        list[str], Meta(description="networks to simulate between nodes, as handoff.links")
    ] = msgspec.field(default_factory=list)
    transports: Transports = msgspec.field(default_factory=list)
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    policy: PolicyConfig = PolicyConfig()

    flag_groups = _FLAGS

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if a network is not told as it must be."""
        check_links(self.links)

    @property
    def contestants(self) -> list[PolicyContestant]:
        """The policies that are compared. Raises ConfigError."""
        if self.policies and not self.modes:
            raise ConfigError("--policies needs a mode to run in: name one with --modes")
        return [PolicyContestant.parse(text, self.modes[0]) for text in self.policies]

    @property
    def backends(self) -> list[Backend]:
        """The other servers.

        Raises:
            ConfigError: one is not described as it must be, or has the name of a mode.
        """
        backends = parse_backends(self.against)
        for backend in backends:
            if backend.name in (*get_args(Mode), *self.policies):
                raise ConfigError(f"--against {backend.name}=...: a mode or policy has this name")
        return backends

    @property
    def plan(self) -> ComparePlan:
        """How much is measured; less of it if it must be quick.

        Raises:
            ConfigError: a mode or scenario is named twice, or nothing at all, rates do not rise, no
                such shape, or the numbers of nodes are not for a mode.
        """
        for flag in ("modes", "policies", "scenarios"):
            names = getattr(self, flag)
            if len(set(names)) < len(names):
                raise ConfigError(f"--{flag} {','.join(names)}: must not name anything twice")
        if not self.modes and not self.against:
            raise ConfigError("--modes names none, and no --against another server: name any")
        check_equal_pools(self.modes, self.prefill, self.decode)
        if self.shape not in SHAPES:
            raise ConfigError(f'--shape "{self.shape}": there are {", ".join(SHAPES)}')
        if sorted(set(self.rates)) != self.rates:
            raise ConfigError(f"--rates {','.join(map(str, self.rates))}: must rise")
        quick = self.quick
        duration_s = min(self.duration_s, _QUICK_RUN_S) if quick else self.duration_s
        if self.rates and self.rates[-1] * duration_s > _MOST_REQUESTS:
            raise ConfigError(
                f"--rates {self.rates[-1]:g}: a run of {duration_s:g} s would have "
                f"{self.rates[-1] * duration_s:.0f} requests, and may have {_MOST_REQUESTS}: give "
                "lower rates, or a shorter --duration-s"
            )
        chunks = self.chunks
        if quick:
            chunks = [chunk for chunk in chunks if chunk in _QUICK_CHUNKS] or chunks[:1]
        names_of_policies = [chosen.name for chosen in self.contestants]
        layouts = (False, True) if self.one_node else (False,)
        return ComparePlan(
            modes=[*self.modes, *names_of_policies, *(backend.name for backend in self.backends)],
            tunings=[Tuning(chunk, one_node) for one_node in layouts for chunk in chunks],
            ttft_s=self.ttft_s,
            tpot_s=self.tpot_s,
            ttft_scale=self.ttft_scale,
            tpot_scale=self.tpot_scale,
            target=self.target,
            seed=self.seed,
            rates=self.rates,
            duration_s=duration_s,
            least_requests=_QUICK_REQUESTS if quick else _LEAST_REQUESTS,
            idle_requests=min(self.idle_requests, _QUICK_IDLE) if quick else self.idle_requests,
            warm_up=_WARM_UP,
            budget_s=min(self.budget_s, _QUICK_BUDGET_S) if quick else self.budget_s,
            is_quick=quick,
            shortens=quick and not (self.rates or self.length_scale or self.ttft_s or self.tpot_s),
        )
