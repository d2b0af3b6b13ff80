"""What several coordinators of the same nodes have together, each takes its part of.

Nodes report how many coordinators they are attached to. So places in the line and quotas are
divided by their number within a heartbeat of a coordinator's coming or going, and no store is asked
for a request. Clients are spread evenly by whatever stands in front of the coordinators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from coordinator.nodes.registry import Member, Registry

log = logging.getLogger(__name__)


class Shares:
    """Tells `listeners` the number of coordinators whenever it changes; it is 1 at first."""

    def __init__(self, registry: Registry, listeners: Sequence[Callable[[int], None]]) -> None:
        self._registry = registry
        self._listeners = listeners
        self._number = 1
        registry.on_changed(self._look)
        registry.on_lost(self._look)

    def _look(self, _: Member) -> None:
        number = self._registry.num_coordinators
        if number == self._number:
            return
        self._number = number
        log.info("%d coordinators share the nodes, and places in line and quotas", number)
        for listener in self._listeners:
            listener(number)
