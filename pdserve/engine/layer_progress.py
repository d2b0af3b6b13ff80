"""How a runner says, while a step is still running, which layers' KV is in the pool already."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerProgress:
    """What somebody wants to hear of a running step."""

    ends: Sequence[int]  # numbers of layers, ascending
    done: Callable[[int], None]  # called with each of them, from the runner's thread
