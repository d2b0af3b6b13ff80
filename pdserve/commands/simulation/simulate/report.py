"""The answer of `pdserve simulate`."""

from __future__ import annotations

from typing import Literal

import msgspec

from pdserve.commands.bench.compare.goodput import Goodput
from pdserve.commands.bench.load.outcome import Promise
from pdserve.commands.simulation.predict.answer import Card
from pdserve.commands.simulation.predict.deployment import Deployment, Result


class ModeAnswer(msgspec.Struct, frozen=True):
    """One deployment: its runs by rate, and its goodput if that was searched for."""

    deployment: Deployment
    goodput: Goodput | None
    rows: list[Result]
    outside: list[float]  # rates that the search left out
    why: str  # it did so


class SimulateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of `pdserve simulate`."""

    card: Card
    load: str
    promise: Promise
    target: float
    modes: list[ModeAnswer]

    @property
    def speed(self) -> float:
        """Simulated seconds per second of one core."""
        rows = [row for mode in self.modes for row in mode.rows]
        return sum(row.seconds for row in rows) / sum(row.cpu_s for row in rows)

    def off_tokens(self, by: Literal["kind", "mean"]) -> float:
        """Mean tokens between the length of an answer and what was expected at its end."""
        rows = [row for mode in self.modes for row in mode.rows]
        return sum(row.off_tokens[by] for row in rows) / max(1, sum(r.num_answers for r in rows))
