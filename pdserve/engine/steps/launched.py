"""A step on a device, as the thread that computes steps sees it: launched, and later waited for."""

from __future__ import annotations

from contextlib import suppress

from pdserve.engine.interface import LaunchedStep, Sampled
from pdserve.engine.request import Scheduled
from pdserve.measured.perf_model import StepShape
from pdserve.shared.clock import Clock


class StepUnderWay:
    """A step from its launch to its end, with what is known of it."""

    def __init__(
        self,
        rows: list[Scheduled],
        shape: StepShape,
        prepared: LaunchedStep,
        clock: Clock,
        planned_s: float,
    ) -> None:
        self.rows = rows  # as launched
        self.shape = shape  # as planned
        self.prepared = prepared
        self.planned_s = planned_s
        self.started_s = clock.now()  # or when the device has turned to it, if that is later
        self.error: Exception | None = None  # of its launch
        self._clock = clock

    def launch(self) -> None:
        """Launch it; an error is that of its result."""
        try:
            self.prepared.launch()
        except Exception as error:  # noqa: BLE001  it is raised when its turn has come
            self.error = error

    def result(self) -> tuple[Sampled, float]:
        """Wait for its end; return what was sampled, and when."""
        if self.error is not None:
            raise self.error
        return self.prepared.result(), self._clock.now()

    def settle(self) -> None:
        """Wait for its end, whatever comes of it: nobody wants to know."""
        with suppress(Exception):
            self.result()
