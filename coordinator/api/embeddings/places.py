"""Places for the prompts of calls that have many: a few of each payer, whose calls take turns.

A prompt is a leg of its own, which costs the coordinator about as much as a chat. So a prompt waits
here for its payer's turn, before there is a leg of it anywhere.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Final

from pdserve.shared.fair_share import Turns

AT_ONCE: Final = 16  # prompts of one payer that run, or wait in the cluster


class PromptPlaces:
    """The places of all payers. Used on one event loop."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._turns: dict[str, Turns] = {}  # by payer; with those who have or want a place
        self._num_of: Counter[str] = Counter()

    async def take(self, payer: str, call: str) -> None:
        """Wait for a place; the calls of a payer take turns."""
        self._num_of[payer] += 1
        try:
            await self._turns.setdefault(payer, Turns(self._at_once)).take(call)
        except asyncio.CancelledError:
            self._left(payer)
            raise

    def try_take(self, payer: str) -> bool:
        """Take a place if there is one."""
        if not self._turns.setdefault(payer, Turns(self._at_once)).try_take():
            return False
        self._num_of[payer] += 1
        return True

    def give_back(self, payer: str) -> None:
        """Give a place back that was taken."""
        self._turns[payer].pass_on()
        self._left(payer)

    def _left(self, payer: str) -> None:
        self._num_of[payer] -= 1
        if not self._num_of[payer]:
            del self._num_of[payer], self._turns[payer]
