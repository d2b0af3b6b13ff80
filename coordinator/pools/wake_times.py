"""How long nodes take to wake as each model, learned from the wakes that were seen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

FIRST_WAKE_S: Final = 1.0
_LEARNED: Final = 0.3  # share of the last wake in what is known
# So much above the mean, in mean absolute deviations, that nine in ten take no longer if they are
# spread normally.
_DEVIATIONS: Final = 1.6


@dataclass(slots=True)
class _Seen:
    mean_s: float
    deviation_s: float = 0.0  # mean absolute

    def add(self, took_s: float) -> None:
        self.deviation_s += _LEARNED * (abs(took_s - self.mean_s) - self.deviation_s)
        self.mean_s += _LEARNED * (took_s - self.mean_s)

    @property
    def expected_s(self) -> float:
        return self.mean_s + _DEVIATIONS * self.deviation_s


@dataclass(slots=True)
class WakeTimes:
    """Two numbers for each model, and for all of them together."""

    most_s: float  # no wake counts as longer
    first_s: float = FIRST_WAKE_S  # as long as none was seen
    _by_model: dict[str, _Seen] = field(default_factory=dict)
    _of_all: _Seen | None = None

    def expected_s(self, model: str) -> float:
        """Return the seconds in which a wake as this model is expected to be over.

        Before the first one it is taken to be like those of other models.
        """
        seen = self._by_model.get(model, self._of_all)
        return self.first_s if seen is None else min(seen.expected_s, self.most_s)

    def learn(self, model: str, took_s: float) -> None:
        """Learn from a wake: from its order until the node was ready."""
        took_s = min(took_s, self.most_s)
        if self._of_all is None:
            self._of_all = _Seen(took_s)
        self._of_all.add(took_s)
        self._by_model.setdefault(model, _Seen(took_s)).add(took_s)
