"""Turns in which the readers of token events are woken, with time for other work in between.

Waking a reader costs far more than one more token for a reader that is woken anyway: it encodes an
event and writes to a socket. So readers are woken in turns of a few, and between turns is a rest
that lasts as long as the turns took. Where little is to be written the rest is too short to be
noticed. Under load, streams are written less often and more at a time, and requests do not wait
behind them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from pdserve.clock import Clock

NUM_PER_TURN = 8  # readers; after them, the event loop looks for requests and messages
_REST = 1.0  # seconds of rest for a second of turns
_SHORTEST_REST_S = 0.001  # timers of event loops are no finer
_LONGEST_REST_S = 0.05  # a process that had no core was not busy writing
PIECE = 512  # tokens turned into text; a few microseconds each
SCORED = 4  # what a token with log-probabilities counts for: up to 21 entries are encoded


class WriteTurns:
    """The readers that are due, first come, first served; one for all calls.

    Another one is for the pieces of long work (`LongWork`), one of them per turn.
    """

    def __init__(self, clock: Clock, num_per_turn: int = NUM_PER_TURN) -> None:
        self._clock = clock
        self._num_per_turn = num_per_turn
        self._due: deque[Callable[[], None]] = deque()
        self._is_set = False  # whether the next turn, or the end of this one, is scheduled
        self._begun_s = 0.0  # when this turn's readers began
        self._next_s = 0.0  # when the next turn may come

    def wake(self, reader: Callable[[], None]) -> None:
        """Call `reader`, which makes a task ready to run, when it is its turn."""
        self._due.append(reader)
        if not self._is_set:
            self._set()

    async def next_turn(self) -> None:
        """Return when it is the turn of the task that calls this."""
        turn = asyncio.get_running_loop().create_future()
        self.wake(lambda: None if turn.done() else turn.set_result(None))
        await turn

    def _set(self) -> None:
        self._is_set = True
        loop, rest_s = asyncio.get_running_loop(), self._next_s - self._clock.now()
        if rest_s < _SHORTEST_REST_S:
            loop.call_soon(self._turn)
        else:
            loop.call_later(rest_s, self._turn)

    def _turn(self) -> None:
        """Make a few readers ready to run. They run between `_begin` and `_end`."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._begin)
        for _ in range(min(self._num_per_turn, len(self._due))):
            self._due.popleft()()
        loop.call_soon(self._end)

    def _begin(self) -> None:
        self._begun_s = self._clock.now()

    def _end(self) -> None:
        now_s = self._clock.now()
        next_s = max(self._next_s, self._begun_s) + (1 + _REST) * (now_s - self._begun_s)
        self._next_s = min(next_s, now_s + _LONGEST_REST_S)
        self._is_set = False
        if self._due:
            self._set()


class LongWork:
    """Long work for one call, in pieces between which other calls have their turn.

    Work is counted, not timed: a piece is what takes one or two milliseconds. `turns` are shared by
    the long work of all calls.
    """

    def __init__(self, turns: WriteTurns) -> None:
        self._turns = turns
        self._done = 0

    def restart(self) -> None:
        """Begin a new piece: the event loop has just had its turn."""
        self._done = 0

    async def did(self, amount: int) -> None:
        """Count work that was just done; at the end of a piece, wait for the next turn."""
        self._done += amount
        if self._done >= PIECE:
            self._done = 0
            await self._turns.next_turn()
