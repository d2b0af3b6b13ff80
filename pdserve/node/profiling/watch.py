"""Notices that a profile was taken in a bad moment: steps in service keep being faster than it.

Slower steps say nothing about a profile. They include what it leaves out, the event loop and waits
for the cores, and neighbours come and go.
"""

from __future__ import annotations

from collections.abc import Callable

from pdserve.measured.perf_model import PerfModel

FASTER = 0.75  # ratio of real to profiled time from which on the profile is wrong
CONVINCING_STEPS = 200  # in a row


class ProfileWatch:
    """Compares the running correction of a node's costs with what a good profile would need."""

    def __init__(self, perf: PerfModel, doubt: Callable[[float], object]) -> None:
        """Watch `perf`; call `doubt` at most once, with the profile's relative error."""
        self._perf = perf
        self._doubt = doubt
        self._num_faster = 0
        self._is_doubted = False

    def stepped(self) -> None:
        """Look, after a step has been observed."""
        ratio = min(self._perf.prefill_ratio, self._perf.decode_ratio)
        self._num_faster = self._num_faster + 1 if ratio < FASTER else 0
        if self._num_faster >= CONVINCING_STEPS and not self._is_doubted:
            self._is_doubted = True
            self._doubt(1 / ratio - 1)
