"""Long work for one call on the event loop, in pieces between which other calls have their turn.

Work is counted, not timed: a piece is what takes one or two milliseconds.
"""

from __future__ import annotations

from coordinator.api.answer.write_turns import WriteTurns

PIECE = 512  # tokens turned into text; a few microseconds each
SCORED = 4  # what a token with log-probabilities counts for: up to 21 entries are encoded


class LongWork:
    """Counts the work of one call. `turns` are shared by the long work of all calls."""

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
