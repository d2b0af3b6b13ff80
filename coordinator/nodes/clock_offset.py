"""How far a node's clock is ahead of ours, measured over its heartbeats."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_MOST = 20  # of the last reports: ten seconds of heartbeats


class ClockOffset:
    """What the reports tell. Nothing depends on it but logs, traces and certificates."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._measured: deque[float] = deque(maxlen=_MOST)

    def heard(self, sent_at: float) -> None:
        """A report has come, sent at that time of the node, in seconds since 1970; 0: not told."""
        if sent_at:
            self._measured.append(sent_at - self._now())

    @property
    def ms(self) -> float | None:
        """Milliseconds that the node is ahead; None: it has not told.

        It is too small by the time that the fastest of the reports was on its way.
        """
        return max(self._measured) * 1e3 if self._measured else None
