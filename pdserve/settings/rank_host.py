"""Settings of `pdserve rank`."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from pdserve.settings.access import SecurityConfig
from pdserve.settings.config import EngineConfig, WeightsConfig
from pdserve.settings.flag_groups import Groups
from pdserve.settings.struct import ConfigStruct, Port
from pdserve.settings.timeouts import NodeTimeouts

_FLAGS: Final[Groups] = {
    "network": ("host", "port"),
    "model": ("model", "revision"),
    "performance": ("device", "threads", "cpus"),
}


class RankHostConfig(ConfigStruct, frozen=True):
    """A further host of a node. What is not said here, the node says."""

    flag_groups = _FLAGS

    host: Annotated[str, Meta(description="address to listen on, for the host before")] = (
        "127.0.0.1"
    )
    port: Annotated[Port, Meta(description="port to listen on; 0: any free port")] = 7100
    checkpoint: WeightsConfig = WeightsConfig()
    engine: EngineConfig = EngineConfig()
    security: SecurityConfig = SecurityConfig()
    timeouts: NodeTimeouts = NodeTimeouts()
