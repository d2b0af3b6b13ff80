"""Settings that `pdserve simulate` and `pdserve plan` share. Light to import."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.commands.bench.load.promises import Scale, TpotPromise, TtftPromise
from pdserve.commands.bench.load.scenarios import ScenarioName
from pdserve.settings.config import PolicyConfig
from pdserve.settings.struct import ConfigStruct, Count, Seconds


class PredictConfig(ConfigStruct, frozen=True):
    """The load, what is promised, and what it runs on."""

    calibration: Annotated[
        str, Meta(description="calibration file of a node, or a built-in one: a100-13b, core-53m")
    ] = "core-53m"
    prefill_calibration: Annotated[
        str,
        Meta(
            description="that of prefill nodes with other weights, with which mode disaggregated "
            "is tried, too"
        ),
    ] = ""
    scenario: Annotated[
        ScenarioName, Meta(description="a synthetic mixture of requests, as in bench compare")
    ] = "long-prompts"
    trace: Annotated[
        str, Meta(description="this trace instead: of pdserve record, Mooncake or Azure")
    ] = ""
    length_scale: Annotated[
        Scale, Meta(description="factor on all lengths; 0: chosen to fit the model")
    ] = 0.0
    ttft_s: TtftPromise = 0.0
    tpot_s: TpotPromise = 0.0
    target: Annotated[
        float, Meta(gt=0, lt=1, description="share of each kind of requests that must meet both")
    ] = 0.9
    requests: Annotated[Count, Meta(description="requests of each run")] = 400
    seeds: Annotated[Count, Meta(description="runs with different random numbers")] = 1
    one_host: Annotated[
        bool,
        Meta(description="all nodes share one memory bus, as the calibration has it"),
    ] = False
    extrapolate: Annotated[
        bool, Meta(description="answer outside of what was calibrated too, and say so")
    ] = False
    json: Annotated[bool, Meta(description="print JSON")] = False
    policy: PolicyConfig = msgspec.field(default_factory=PolicyConfig)


Rate = Seconds  # requests per second; above 0
