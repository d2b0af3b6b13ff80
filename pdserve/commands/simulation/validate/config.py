"""Config of `pdserve bench prediction`. Light to import."""

from __future__ import annotations

import re
from typing import Annotated, Final, get_args

import msgspec
from msgspec import Meta

from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.commands.bench.load.promises import Scale, TpotPromise, TtftPromise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.settings.config import EngineConfig, Mode
from pdserve.settings.flag_groups import Groups
from pdserve.settings.struct import ConfigStruct, Count, Seconds
from pdserve.settings.values import check_equal_pools
from pdserve.shared.errors import ConfigError

_FLAGS: Final[Groups] = {
    "nodes": ("calibration", "calibrate_s", "shape", "deployments", "threads"),
    "load": ("scenarios", "traces", "loads", "requests", "run_s", "seed"),
    "promises": ("ttft_s", "tpot_s", "promise_factors", "target"),
    "answer": ("json",),
}
_DEPLOYMENT = re.compile(r"(\d+)P(\d+)D")


class PredictionConfig(ConfigStruct, frozen=True):
    """The same requests to clusters on this machine, and to simulations of them."""

    flag_groups = _FLAGS

    calibration: Annotated[
        str, Meta(description="calibration of such nodes on this machine; empty: made first")
    ] = ""
    calibrate_s: Annotated[Seconds, Meta(description="time for that")] = 160.0
    shape: Annotated[str, Meta(description=f"shape of the random weights: {', '.join(SHAPES)}")] = (
        "50m"
    )
    deployments: Annotated[
        list[str], Meta(min_length=1, description="MODE:NUMBERS, or NUMBERS if disaggregated")
    ] = msgspec.field(
        default_factory=lambda: ["1P1D", "2P1D", "1P2D", "colocated:2", "adaptive:1P1D"]
    )
    scenarios: Annotated[
        list[ScenarioName],
        Meta(description="built-in workloads; neither these nor traces: two of them"),
    ] = msgspec.field(default_factory=list)
    traces: Annotated[
        list[str], Meta(description="replay these traces, too, from their beginnings")
    ] = msgspec.field(default_factory=list)
    loads: Annotated[
        list[Seconds], Meta(min_length=2, description="rates, as shares of the predicted goodput")
    ] = msgspec.field(default_factory=lambda: [0.7, 1.0, 1.3])
    requests: Annotated[Count, Meta(description="requests of each run")] = 100
    run_s: Annotated[Scale, Meta(description="least time over which those of a run arrive")] = 0.0
    ttft_s: TtftPromise = 0.0
    tpot_s: TpotPromise = 0.0
    promise_factors: Annotated[
        list[Seconds], Meta(min_length=1, description="factors on both promises; a case for each")
    ] = msgspec.field(default_factory=lambda: [1.0])
    target: Annotated[
        float, Meta(gt=0, lt=1, description="share of each kind of requests that must be in time")
    ] = 0.9
    seed: Annotated[int, Meta(ge=0, description="random seed")] = 0
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)

    def check(self) -> list[tuple[Mode, int, int]]:
        """Return the deployments as (mode, prefill nodes, decode nodes).

        Raises:
            ConfigError: one of them is none, or the loads do not rise.
        """
        if sorted(set(self.loads)) != self.loads:
            raise ConfigError(f"--loads {','.join(map(str, self.loads))}: must rise")
        return [_parse(text) for text in self.deployments]


def _parse(text: str) -> tuple[Mode, int, int]:
    mode, _, numbers = text.rpartition(":")
    mode = mode or "disaggregated"
    matched = _DEPLOYMENT.fullmatch(numbers)
    if mode == "colocated" and numbers.isdecimal() and int(numbers):
        return "colocated", 0, int(numbers)
    if mode not in get_args(Mode) or mode == "colocated" or matched is None:
        raise ConfigError(
            f"--deployments {text}: must be such as 1P2D, adaptive:1P1D or colocated:2"
        )
    num_prefill, num_decode = map(int, matched.groups())
    if not num_prefill or not num_decode:
        raise ConfigError(f"--deployments {text}: needs nodes of both roles")
    check_equal_pools([mode], num_prefill, num_decode)
    return msgspec.convert(mode, Mode), num_prefill, num_decode
