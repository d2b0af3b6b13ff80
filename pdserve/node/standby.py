"""Whether a node has loaded and waits for a coordinator to give it a pool."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from pdserve.node.engine_watch import EngineWatch
from pdserve.shared.process.signals import StopSignals

log = logging.getLogger(__name__)


class Standby:
    """`on_begin` is called when it begins to wait, and coordinators should hear of that."""

    def __init__(self, node_id: str, on_begin: Callable[[], None]) -> None:
        self._node_id = node_id
        self._on_begin = on_begin
        self._given = asyncio.Event()
        self.is_waiting = False

    def role_given(self) -> None:
        """A coordinator has given the node a pool: it waits no more, or will not begin to."""
        self._given.set()

    async def wait(self, watch: EngineWatch, signals: StopSignals) -> None:
        """Wait for a pool, or for SIGTERM.

        Raises:
            NodeSick: it could not compute any more.
        """
        self.is_waiting = True
        log.info("%s is on standby", self._node_id)
        try:
            self._on_begin()
            await watch.until(self._given.wait(), signals.drain.wait())
        finally:
            self.is_waiting = False
