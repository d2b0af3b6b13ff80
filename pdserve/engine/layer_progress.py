"""How a runner reports, while a step is running, which layers' KV is already in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """A subscription to the progress of a running step."""

    ends: Sequence[int]  # layer counts to report, ascending
    done: Callable[[int], None]  # called with each of them, from the runner's thread

    def reached(self, num_layers: int) -> None:
        """Report the KV of the first `num_layers` layers, if that is asked for."""
        if num_layers in self.ends:
            self.done(num_layers)
