"""The largest step of a node, and of its parts, if stages compute it in parts. No torch here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class LargestStep:
    """The largest step that a node may compute."""

    num_tokens: int
    num_requests: int


ANY_STEP: Final = LargestStep(2048, 256)  # where nobody limits steps; no graph is larger

# With fewer rows a layer of a GPU takes as long as reading its weights, which parts would repeat:
# so smaller steps, as those of decodes that graphs replay, stay whole.
LEAST_PART: Final = 256


def num_parts(num_rows: int, num_stages: int, least: int = LEAST_PART) -> int:
    """Return in how many parts of at least so many rows stages compute a step. All agree on it."""
    return 1 if num_stages == 1 else max(1, num_rows // least)


def largest_part(most_rows: int, num_stages: int, least: int = LEAST_PART) -> int:
    """Return the most rows of a part of any step of up to `most_rows`."""
    return most_rows if num_stages == 1 else min(most_rows, 2 * least - 1)
