"""The config of `pdserve up`: one coordinator and its nodes."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from pdserve.settings.access import AccessConfig
from pdserve.settings.answers import AnswerConfig
from pdserve.settings.config import (
    ONE_POOL,
    CheckpointConfig,
    Checksums,
    ClusterMode,
    EngineConfig,
    HandoffConfig,
    MaxInflight,
    Models,
    PolicyConfig,
    ProfileConfig,
    RoutingConfig,
    Transports,
)
from pdserve.settings.flag_groups import CLUSTER
from pdserve.settings.prefixes import PrefixConfig
from pdserve.settings.speculation import SpeculationConfig
from pdserve.settings.struct import ConfigStruct, Count, Port, Seconds
from pdserve.settings.timeouts import Timeouts
from pdserve.settings.tracing import TracingConfig
from pdserve.settings.values import check_router
from pdserve.shared.errors import ConfigError

SLEEP_AFTER_S: Final = 300.0  # `routing.sleep_after_s` of a cluster that may have no nodes


class Scale(msgspec.Struct, frozen=True):
    """The least and the most nodes of each pool."""

    least: int
    most: int

    def is_first(self, name: str) -> bool:
        """Whether a node is there from the start on, and not only when it is needed."""
        return int(name.rpartition("-")[2]) < max(1, self.least)


class ClusterConfig(ConfigStruct, frozen=True):
    """A cluster that one command runs. What all nodes share is given once."""

    flag_groups = CLUSTER

    prefill: Annotated[
        Annotated[int, Meta(ge=0)] | None,
        Meta(description="number of prefill nodes (default: 1, or 0 if colocated or multiplexed)"),
    ] = None
    decode: Annotated[Count, Meta(description="number of decode nodes")] = 1
    autoscale: Annotated[
        str,
        Meta(
            description="MIN:MAX nodes of each pool, as load asks for; instead of the numbers, and "
            "with rebalance"
        ),
    ] = ""
    mode: ClusterMode = "disaggregated"
    on: Annotated[
        str,
        Meta(
            description="machines: ray: of the Ray cluster that this one is in; ray://HOST:10001: "
            "of that one; empty: only this one"
        ),
    ] = ""
    host: Annotated[str, Meta(description="address that the coordinator listens on")] = "127.0.0.1"
    port: Annotated[Port, Meta(description="HTTP port of the coordinator; 0: any free port")] = 8000
    max_inflight: MaxInflight = 1024
    transports: Transports = msgspec.field(default_factory=list)
    checksums: Checksums = True
    start_s: Annotated[
        Seconds, Meta(description="deadline for every process to be ready, downloads included")
    ] = 900.0
    models: Models = ""
    checkpoint: CheckpointConfig = CheckpointConfig()
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    profile: ProfileConfig = ProfileConfig()
    policy: PolicyConfig = PolicyConfig()
    answers: AnswerConfig = AnswerConfig()
    routing: RoutingConfig = RoutingConfig()
    access: AccessConfig = AccessConfig()
    tracing: TracingConfig = TracingConfig()
    handoff: HandoffConfig = HandoffConfig()
    prefix: PrefixConfig = PrefixConfig()
    timeouts: Timeouts = Timeouts()

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if the machines are not said right."""
        if self.on not in ("", "ray") and not self.on.startswith("ray://"):
            raise ValueError(f"on: {self.on!r} must be ray, ray://HOST:PORT or empty")
        check_router(self.routing.router, self.mode)
        self.prefix.check_used(prefix_cache=self.engine.prefix_cache)
        if self.engine.is_by_role and self.mode != "disaggregated":
            raise ValueError(
                "engine.prefill_quantization is for mode disaggregated: with mode "
                f"{self.mode} nodes compute prompts and answers"
            )
        if self.autoscale and (self.prefill is not None or self.decode != 1):
            raise ValueError(
                f"autoscale: {self.autoscale!r} says how many nodes each pool has: leave prefill "
                "and decode out"
            )
        if self.models:
            self._check_models()
        if self.mode == "multiplexed":
            for name, given in (
                ("tensor_parallel", self.engine.tensor_parallel > 1),
                ("pipeline_parallel", self.engine.pipeline_parallel > 1),
                ("rank_hosts", self.engine.rank_hosts),
            ):
                if given:
                    raise ValueError(
                        f"{name}: not in mode multiplexed, in which a node computes alone, with "
                        "two steps at a time"
                    )

    def _check_models(self) -> None:
        """Raise ValueError: what a file of models says is said otherwise, too."""
        for name, is_given in (
            ("on", self.on),
            ("autoscale", self.autoscale),
            ("prefill", self.prefill is not None),
            ("decode", self.decode != 1),
        ):
            if is_given:
                raise ValueError(
                    f"{name}: not beside models, whose file says how many nodes of this machine "
                    "each model has"
                )

    @property
    def scale(self) -> Scale | None:
        """How many nodes each pool may have; None: as many as at the start.

        Raises:
            ConfigError: that is not said as it must be.
        """
        if not self.autoscale:
            return None
        least, _, most = self.autoscale.partition(":")
        if not (least.isdecimal() and most.isdecimal() and int(least) <= int(most) > 0):
            raise ConfigError(
                f"--autoscale {self.autoscale}: must be MIN:MAX, such as 1:4, or 0:4 if no node is "
                "to run while nobody asks for anything"
            )
        return Scale(int(least), int(most))

    @property
    def num_decode(self) -> int:
        """How many decode nodes there may be at most. Raises as `scale`."""
        return self.decode if self.scale is None else self.scale.most

    @property
    def num_prefill(self) -> int:
        """How many prefill nodes there may be at most.

        Raises:
            ConfigError: the number asked for contradicts the mode.
        """
        has_one_pool = self.mode in ONE_POOL
        if self.scale is not None:
            return 0 if has_one_pool else self.scale.most
        if self.prefill is None:
            return 0 if has_one_pool else 1
        if has_one_pool and self.prefill:
            raise ConfigError(
                f"--prefill {self.prefill} with --mode {self.mode}: in that mode each node "
                "prefills its own requests; leave --prefill out"
            )
        if not has_one_pool and not self.prefill:
            raise ConfigError(
                f"--prefill 0 with --mode {self.mode}: that mode needs prefill nodes; use --mode "
                "colocated"
            )
        return self.prefill
