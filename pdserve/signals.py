"""SIGTERM, SIGINT and SIGHUP as events: the first signal drains, the second stops at once."""

from __future__ import annotations

import asyncio
import signal


class StopSignals:
    """Signal handlers of the running event loop. Once set, an event stays set."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.add_signal_handler(signum, self._received)

    def _received(self) -> None:
        if self.drain.is_set():
            self.now.set()
        self.drain.set()
