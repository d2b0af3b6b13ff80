"""Measures work on a GPU, by events in its own stream of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

import torch

_NUM_RUNS: Final = 5


class DeviceStopwatch(Protocol):
    """Measures work on a GPU; tests have one without."""

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long the work takes, once it has been done before."""


class CudaStopwatch:
    """Implements Stopwatch with events on the current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def seconds(self, work: Callable[[], object]) -> float:
        """Return how long the work takes on the stream, once it has been done before."""
        work()
        stream = torch.cuda.current_stream(self._device)
        begin = stream.record_event(self._event())
        for _ in range(_NUM_RUNS):
            work()
        end = stream.record_event(self._event())
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / _NUM_RUNS

    def _event(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
