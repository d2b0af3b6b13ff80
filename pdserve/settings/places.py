"""A place of a node: a process with one model, beside others on the same cores and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from msgspec import Meta

from pdserve.settings.struct import ConfigStruct, Size
from pdserve.shared.errors import ConfigError

if TYPE_CHECKING:
    from pdserve.settings.config import EngineConfig

MOST_PLACES: Final = 16  # of a node, as csrc/places/ledger.h has it


class PlaceConfig(ConfigStruct, frozen=True):
    """Of a node that is one of several places; `pdserve up` says so of shared ones."""

    ledger: Annotated[
        str,
        Meta(description="file, as /dev/shm/NAME, that places of a node share; empty: none"),
    ] = ""
    place: Annotated[int, Meta(ge=0, lt=MOST_PLACES, description="its number")] = 0
    place_of: Annotated[str, Meta(description="that node's name")] = ""
    memory: Annotated[Size, Meta(description="for weights and KV of all places")] = "0"

    def __post_init__(self) -> None:
        """Raise ValueError, which becomes a ConfigError, if a ledger is to have no memory."""
        if self.ledger and self.memory == "0":
            raise ValueError("memory: places that share a ledger share a size, as 8GiB")


def check_place(engine: EngineConfig, *, multiplexed: bool) -> None:
    """Raise ConfigError: several places cannot share a node so."""
    asked = (
        ("multiplexed", multiplexed),
        ("device", engine.device.startswith("cuda")),
        ("kv_commit", engine.kv_commit),
        ("tensor_parallel", engine.tensor_parallel > 1),
        ("pipeline_parallel", engine.pipeline_parallel > 1),
        ("rank_hosts", bool(engine.rank_hosts)),
    )
    for name, is_asked in asked:
        if is_asked:
            raise ConfigError(
                f"{name}: not where several models share a node (at_once): each computes alone, "
                "on CPUs, in memory that it gives back"
            )
