"""Warnings that would come with each request, once for a cause, and how often it came since."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

from pdserve.shared.clock import Clock

AGAIN_S: Final = 60.0  # after which a cause that is still there is told again
MOST: Final = 256  # causes that are remembered


@dataclass(slots=True)
class _Told:
    at_s: float
    num_since: int = 0


class OncePerCause:
    """Tells of requests that go on elsewhere: none of them is lost, and the first says it all."""

    def __init__(self, log: logging.Logger, clock: Clock) -> None:
        self._log = log
        self._clock = clock
        self._told: OrderedDict[Hashable, _Told] = OrderedDict()  # by cause, the oldest first

    def note(self, cause: Hashable, text: str) -> None:
        """Something has gone wrong once more, for this reason."""
        now_s = self._clock.now()
        told = self._told.get(cause)
        if told is not None and now_s < told.at_s + AGAIN_S:
            told.num_since += 1
            self._log.debug("goes on elsewhere: %s", text)
            return
        more = f" ({told.num_since} more like it)" if told is not None and told.num_since else ""
        self._log.warning("goes on elsewhere: %s%s", text, more)
        self._told[cause] = _Told(now_s)
        self._told.move_to_end(cause)
        if len(self._told) > MOST:
            self._told.popitem(last=False)
