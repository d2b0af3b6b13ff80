"""A host whose nodes share one memory bus, and perhaps cores.

Profiles do not show what nodes cost each other, since each node measures itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdserve.measured.calibration import Sharing
from pdserve.perf_model import StepShape


@dataclass(slots=True)
class Host:
    """A host, and the steps that its nodes compute at the moment."""

    name: str
    sharing: Sharing = field(default_factory=Sharing)
    threads: int = 1  # that a node computes with
    running: dict[object, StepShape] = field(default_factory=dict)  # by node

    @property
    def is_shared(self) -> bool:
        """Whether a step here depends on what other nodes do."""
        return self.sharing != Sharing()

    def begin(self, node: object, shape: StepShape) -> float:
        """Begin a step; return the factor on the time that it takes alone.

        The factor is that of the present moment, since steps are short.
        """
        others = list(self.running.values())
        self.running[node] = shape
        return self._waits_for_bus(shape, others) * self._waits_for_cores()

    def _waits_for_bus(self, shape: StepShape, others: Sequence[StepShape]) -> float:
        if not others:
            return 1.0
        if not shape.is_decode:
            return self.sharing.prompt_beside_any
        if any(other.is_decode for other in others):
            return self.sharing.decode_beside_decode
        return self.sharing.decode_beside_prompt

    def _waits_for_cores(self) -> float:
        if not self.sharing.cores:
            return 1.0
        return max(1.0, self.threads * len(self.running) / self.sharing.cores)

    def end(self, node: object) -> None:
        """End the node's step."""
        del self.running[node]
