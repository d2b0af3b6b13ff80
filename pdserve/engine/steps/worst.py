"""The largest step of a node. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that a node may compute."""

    num_tokens: int
    num_requests: int


ANY_STEP: Final = LargestStep(2048, 256)  # where nobody limits steps; no graph is larger
