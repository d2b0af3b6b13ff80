"""The legal moves of `kv_transfer/lifecycle.py`, driven block by block and counted."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import TypeVar

from kv_transfer.lifecycle import (
    EXPORTER_MOVES,
    PULLER_MOVES,
    ExporterMove,
    ExporterState,
    PullerMove,
    PullerState,
)
from tests.model.world import Violation

StateT = TypeVar("StateT", bound=Enum)
MoveT = TypeVar("MoveT", bound=Enum)


class Tables:
    """Takes the moves, and remembers which rows were needed."""

    def __init__(self) -> None:
        self.used: set[tuple[Enum, Enum]] = set()

    def exporter(self, state: ExporterState, move: ExporterMove) -> ExporterState:
        return self._take(EXPORTER_MOVES, state, move)

    def puller(self, state: PullerState, move: PullerMove) -> PullerState:
        return self._take(PULLER_MOVES, state, move)

    def _take(
        self, moves: Mapping[tuple[StateT, MoveT], StateT], state: StateT, move: MoveT
    ) -> StateT:
        target = moves.get((state, move))
        if target is None:
            raise Violation(f"a block that is {state.value} was to {move.value}")
        self.used.add((state, move))
        return target
