"""Config of `pdserve calibrate`. Light to import."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.commands.bench.checkpoints.shapes import SHAPES
from pdserve.settings.config import EngineConfig
from pdserve.settings.flag_groups import Groups
from pdserve.settings.struct import ConfigStruct, Seconds
from pdserve.shared.hints.urls import check_url

_FLAGS: Final[Groups] = {
    "nodes": (
        "url",
        "tls_dir",
        "model",
        "shape",
        "threads",
        "dtype",
        "quantization",
        "tensor_parallel",
    ),
    "limits": ("kv_memory", "token_budget", "max_batch_size", "max_model_len"),
    "measurement": ("output", "budget_s", "seed", "json"),
}


class CalibrateConfig(ConfigStruct, frozen=True):
    """One kind of node: of a running cluster, or of clusters that are started for it."""

    flag_groups = _FLAGS

    url: Annotated[
        str,
        Meta(description="coordinator of a cluster that nobody uses; empty: one is started"),
    ] = ""
    tls_dir: Annotated[
        str,
        Meta(
            description="directory of ca.crt, tls.crt and tls.key, if its nodes have certificates"
        ),
    ] = ""
    output: Annotated[str, Meta(description="file to write")] = "calibration.json"
    model: Annotated[
        str, Meta(description="checkpoint directory or hub id; empty: random weights")
    ] = ""
    shape: Annotated[str, Meta(description=f"shape of the random weights: {', '.join(SHAPES)}")] = (
        "50m"
    )
    budget_s: Annotated[
        Seconds, Meta(description="time to measure; starts and ends of clusters come on top")
    ] = 160.0
    seed: Annotated[int, Meta(ge=0, description="random seed")] = 0
    json: Annotated[bool, Meta(description="print JSON")] = False
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if `url` is no address."""
        if self.url:
            check_url(self.url)
