"""What a node knows of a life of it before it loads."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.node.places.place import Place
from pdserve.node.prefixes.host_tier import TierBlocks
from pdserve.node.start.model import NodeModel
from pdserve.protocol import NodeRole
from pdserve.settings.models import NodeOfModel


@dataclass(frozen=True)
class Planned:
    """A node that has not loaded yet."""

    node: NodeOfModel
    role: NodeRole
    model: NodeModel
    tier_blocks: TierBlocks | None = None
    place: Place | None = None  # that it has on a node of several; None: the node is its own
    was: NodeOfModel | None = None  # what its process was the node of before; None: it has started
    refused: str = ""  # the model that it was to become, and could not; empty: there is none

    @property
    def can_go_back(self) -> bool:
        """Whether its process can be what it was, if nobody wants what this is."""
        return self.was not in (None, self.node)
