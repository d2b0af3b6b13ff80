"""Exporters to which no session could be opened, or whose session broke: who may try them again.

A request that has another way to its KV does not wait for what is not there. So an exporter that
failed is left alone for a while, twice as long after each further failure. Then one may try it, and
the others go on without it meanwhile. Who has no other way tries it all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pdserve.shared.clock import Clock

LONGEST_S: Final = 60.0  # for which one is left alone


@dataclass(slots=True)
class _Failures:
    count: int
    next_try_s: float


class Unreached:
    """By incarnation. One that was reached again has no entry."""

    def __init__(self, clock: Clock, first_s: float) -> None:
        """`first_s`: for how long one is left alone after its first failure."""
        self._clock = clock
        self._first_s = first_s
        self._failures: dict[str, _Failures] = {}

    def __len__(self) -> int:
        return len(self._failures)

    def failed(self, incarnation: str) -> None:
        """A session could not be opened, or broke."""
        now_s = self._clock.now()
        # Of most of them nobody hears again: they have ended.
        self._failures = {
            i: each for i, each in self._failures.items() if now_s < each.next_try_s + LONGEST_S
        }
        failures = self._failures.setdefault(incarnation, _Failures(0, now_s))
        pause_s = min(self._first_s * 2.0 ** min(failures.count, 10), LONGEST_S)
        failures.count += 1
        failures.next_try_s = now_s + pause_s

    def reached(self, incarnation: str) -> None:
        """A session is open."""
        self._failures.pop(incarnation, None)

    def leaves_alone(self, incarnation: str, *, is_tried: bool) -> bool:
        """Whether others should do without it; `is_tried`: a session is being opened."""
        failures = self._failures.get(incarnation)
        return failures is not None and (is_tried or self._clock.now() < failures.next_try_s)
