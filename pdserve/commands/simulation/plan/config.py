"""Config of `pdserve plan`. Light to import."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.commands.bench.load.promises import Scale
from pdserve.commands.simulation.plan.devices.catalogue import DEVICES
from pdserve.commands.simulation.predict.config import PredictConfig
from pdserve.settings.config import Mode
from pdserve.settings.flag_groups import Groups
from pdserve.settings.struct import Count
from pdserve.shared.costs import DESCRIPTION, Prices
from pdserve.shared.errors import ConfigError

_FLAGS: Final[Groups] = {
    "load": ("scenario", "trace", "length_scale", "rate", "requests", "seeds"),
    "cluster": ("calibration", "prefill_calibration", "modes", "max_nodes", "price"),
    "devices instead of a calibration": ("devices", "model", "lengths", "plot"),
    "promises": ("ttft_s", "tpot_s", "target", "admission"),
    "answer": ("extrapolate", "json"),
}


class PlanConfig(PredictConfig, frozen=True):
    """The cheapest deployment for a load."""

    flag_groups = _FLAGS

    rate: Annotated[
        Scale, Meta(description="requests per second to serve; 0: the mean rate of the trace")
    ] = 0.0
    modes: Annotated[list[Mode], Meta(min_length=1, description="modes to compare")] = (
        msgspec.field(default_factory=lambda: ["disaggregated", "colocated", "adaptive"])
    )
    max_nodes: Annotated[Count, Meta(description="most nodes to consider")] = 8
    price: Annotated[
        list[str],
        Meta(description=f"{DESCRIPTION}; with --devices h100=2.2"),
    ] = msgspec.field(default_factory=list)

    devices: Annotated[
        list[str], Meta(description=f"which of them to plan with: {', '.join(DEVICES)}")
    ] = msgspec.field(default_factory=list)
    model: Annotated[
        str, Meta(description="checkpoint directory, hub id, or a shape as of pdserve kv")
    ] = "8b"
    lengths: Annotated[str, Meta(description="tokens of a request: PROMPT:OUTPUT")] = "1000:300"
    plot: Annotated[
        str, Meta(description="file for a plot of latency over throughput (PNG); empty: none")
    ] = ""

    admission: Annotated[
        bool, Meta(description="as clusters have it: refuse requests that would be late")
    ] = True

    def check(self) -> None:
        """Check what no single setting says.

        Raises:
            ConfigError: a mode cannot be planned with.
        """
        if "multiplexed" in self.modes:
            raise ConfigError(
                "--modes multiplexed: its nodes are twice as large as the one that was calibrated, "
                "and have no price; `pdserve simulate` compares it with other modes"
            )
        if self.plot and not self.devices:
            raise ConfigError("--plot: only what is planned with --devices has a plot")
        if not (folder := Path(self.plot).parent).is_dir():
            raise ConfigError(f"--plot {self.plot}: there is no directory {folder}")
        loads = ("trace", "prefill_calibration", "length_scale")
        for name in loads if self.devices else ():
            if getattr(self, name):
                raise ConfigError(
                    f"--{name.replace('_', '-')}: not with --devices, whose load is --lengths and "
                    "--rate, and whose step times are of data sheets"
                )

    @property
    def prices(self) -> Prices:
        """The prices.

        Raises:
            ConfigError: one of them is no price.
        """
        try:
            return Prices.of(self.price)
        except ValueError as error:
            raise ConfigError(f"--price: {error}") from error
