"""Which share of the last seconds a node has computed, and which of it for prompts."""

from __future__ import annotations

from math import exp
from typing import Final

from pdserve.engine.interface import StepReport
from pdserve.perf_model import PerfModel

MEMORY_S: Final = 5.0  # after which a third of what was seen still counts


class BusyShare:
    """Moving averages. A step is seen when it ends, and one longer than the looks counts on."""

    def __init__(self, perf: PerfModel, now_s: float) -> None:
        self._perf = perf
        self._looked_s = now_s
        self._busy_s = 0.0  # that no look has counted yet
        self._prompt_s = 0.0  # of these
        self._share = 0.0
        self.prompts = 0.0  # the share, as of the last look, in which prompts were computed

    def stepped(self, report: StepReport, share: float = 1.0) -> None:
        """Note a step that had this share of the node's cores."""
        busy_s = report.period_s * share
        of_prompts = 1.0 if report.of_prompts else self._perf.prompt_share(report.shape)
        self._busy_s += busy_s
        self._prompt_s += busy_s * of_prompts

    def share(self, now_s: float) -> float:
        """Return the share, at most 1."""
        passed_s = now_s - self._looked_s
        if passed_s > 0:
            weight = 1 - exp(-passed_s / MEMORY_S)
            seen_s = min(passed_s, self._busy_s)
            of_prompts = self._prompt_s / self._busy_s if self._busy_s else 0.0
            self._share += weight * (seen_s / passed_s - self._share)
            self.prompts += weight * (of_prompts * seen_s / passed_s - self.prompts)
            self._busy_s = min(self._busy_s - seen_s, MEMORY_S)
            self._prompt_s = of_prompts * self._busy_s
            self._looked_s = now_s
        return self._share
