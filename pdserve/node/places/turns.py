"""Steps in turn: the places of a node compute on the same cores, one at a time.

The turn goes to the place whose step is due first: when the most urgent token or prompt is due,
less the time of a step. Nothing is due later than PATIENCE_S after its place began to wait, nor
earlier than LATE_S before, so that each place has its turn in bounded time. A place that nobody
waits for keeps it, which costs a microsecond. Who is frozen in its turn, or dies, loses it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Final

from pdserve._native import Ledger
from pdserve.engine.engine import Engine
from pdserve.engine.request import next_due_s, tpot_s
from pdserve.shared.clock import Clock

PATIENCE_S: Final = 0.25
LATE_S: Final = 1.0
WAIT_S: Final = 0.1  # at a time: then it looks again how urgent its work is
LEASE_S: Final = 2.0  # and several steps: who takes longer computes beside the others


class PlaceTurns:
    """The turns of one engine: a `Turns`."""

    def __init__(self, ledger: Ledger, engine: Engine, clock: Clock, default_tpot_s: float) -> None:
        self.waited_s = 0.0
        self._began_s: float | None = None  # it has waited since then for its next turn
        self._ledger = ledger
        self._engine = engine
        self._clock = clock
        self._default_tpot_s = default_tpot_s

    def take(self) -> bool:
        """As Turns.take."""
        return self._ledger.try_turn(self._lease_s)

    def wait(self) -> Callable[[], bool]:
        """As Turns.wait."""
        if self._began_s is None:
            self._began_s = self._clock.now()
        return partial(self._wait, self._due_s(self._began_s), self._lease_s)

    def over(self, *, has_more: bool) -> None:
        """As Turns.over."""
        self._began_s = None
        if not has_more:
            self._ledger.pass_turn(False)
        elif self._ledger.num_waiting:
            due_s = self._due_s(self._clock.now(), num_new=1)
            self._ledger.pass_turn(True, due_s, self._lease_s)

    def _wait(self, due_s: float, lease_s: float) -> bool:
        began_s = self._clock.now()
        has_turn = self._ledger.await_turn(due_s, lease_s, WAIT_S)
        self.waited_s += self._clock.now() - began_s
        if has_turn:
            self._began_s = None
        return has_turn

    @property
    def _lease_s(self) -> float:
        return LEASE_S + 4 * self._engine.step_time_s

    def _due_s(self, began_s: float, num_new: int = 0) -> float:
        """When the next step is due of a place that began to wait then.

        `num_new`: tokens that streams have, but do not show yet.
        """
        queues, default_s = self._engine.queues, self._default_tpot_s
        first_s = min(
            (
                next_due_s(r, default_s) + num_new * (tpot_s(r, default_s) if r.is_decoding else 0)
                for r in (*queues.running, *queues.waiting)
            ),
            default=inf,
        )
        return min(max(first_s - self._engine.step_time_s, began_s - LATE_S), began_s + PATIENCE_S)


class LoadingTurns:
    """The turns of a thread that measures steps before its engine runs."""

    def __init__(self, ledger: Ledger, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock

    def next(self, check_wanted: Callable[[], None]) -> None:
        """Let others have their turn, and wait for the next one; `check_wanted` may end the wait.

        Raises: what `check_wanted` raises.
        """
        due_s = self._clock.now() + PATIENCE_S
        if self._ledger.try_turn(LEASE_S) and not self._ledger.num_waiting:
            return
        self._ledger.pass_turn(False)
        while not self._ledger.await_turn(due_s, LEASE_S, WAIT_S):
            check_wanted()

    def over(self) -> None:
        """Nothing is measured any more."""
        self._ledger.pass_turn(False)
