"""Config of `pdserve simulate`. Light to import."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.commands.bench.compare.policies import PolicyContestant
from pdserve.commands.simulation.predict.config import PredictConfig, Rate
from pdserve.settings.config import Mode
from pdserve.settings.flag_groups import Groups
from pdserve.settings.struct import Count
from pdserve.settings.values import check_equal_pools
from pdserve.shared.errors import ConfigError

_FLAGS: Final[Groups] = {
    "load": ("scenario", "trace", "length_scale", "rates", "scale", "requests", "seeds"),
    "cluster": (
        "calibration",
        "prefill_calibration",
        "modes",
        "policies",
        "prefill",
        "decode",
        "one_host",
        "admission",
    ),
    "promises": ("ttft_s", "tpot_s", "target"),
    "answer": ("extrapolate", "json"),
}


class SimulateConfig(PredictConfig, frozen=True):
    """Deployments of the same nodes, under the same load."""

    flag_groups = _FLAGS

    modes: Annotated[list[Mode], Meta(min_length=1, description="modes to compare")] = (
        msgspec.field(default_factory=lambda: ["disaggregated", "colocated", "adaptive"])
    )
    policies: Annotated[
        list[str],
        Meta(description="the first mode with other policies, too, as `pdserve bench compare`"),
    ] = msgspec.field(default_factory=list)
    prefill: Annotated[Count, Meta(description="number of prefill nodes, unless colocated")] = 1
    decode: Annotated[
        Count,
        Meta(
            description="number of decode nodes; in colocated mode all nodes are; in multiplexed "
            "mode one of each is a node"
        ),
    ] = 1
    rates: Annotated[
        list[Rate], Meta(description="request rates, per second; empty: goodput is searched for")
    ] = msgspec.field(default_factory=list)
    scale: Annotated[
        float, Meta(ge=0, description="of a trace: its own rate times this; 0: not used")
    ] = 0.0
    admission: Annotated[
        bool, Meta(description="let the coordinator refuse requests that would be late")
    ] = False

    def check(self) -> None:
        """Check what no single setting says.

        Raises:
            ConfigError: settings contradict each other.
        """
        if sorted(set(self.rates)) != self.rates:
            raise ConfigError(f"--rates {','.join(map(str, self.rates))}: must rise")
        check_equal_pools(self.modes, self.prefill, self.decode)
        for policies in self.policies:
            PolicyContestant.parse(policies, self.modes[0])
        if self.scale and (self.rates or not self.trace):
            raise ConfigError("--scale is for a --trace, and instead of --rates")
