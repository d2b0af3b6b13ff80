"""Drafts of simulated nodes: guessed as often, and as often right, as was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from pdserve.engine.request import Request
from pdserve.measured.calibration import Drafts

_WRONG: Final = -1
_UNSURE: Final = 0  # how often it is right is learnt, as nodes do


class PlayedGuesses:
    """Implements `pdserve.engine.drafts.source.Source`."""

    name = "played"

    def __init__(self, drafts: Drafts, seed: str, token: Callable[[Request, int], int]) -> None:
        """
        Args:
            drafts: how often something is guessed of a stream, and is right.
            seed: of which.
            token: what a request will say next, or so many tokens later.
        """
        self._drafts = drafts
        self._random = Random(seed)
        self._token = token

    def drafter(self, request: Request) -> PlayedGuesses:
        """As Source.drafter: one for all streams."""
        return self

    def propose(self, request: Request, most: int) -> tuple[Sequence[int], int]:
        """As Drafter.propose."""
        if self._random.random() >= self._drafts.share:
            return (), _UNSURE
        drafts: list[int] = []
        while len(drafts) < most and _WRONG not in drafts[-1:]:
            is_right = self._random.random() < self._drafts.right
            drafts.append(self._token(request, len(drafts)) if is_right else _WRONG)
        return drafts + [_WRONG] * (most - len(drafts)), _UNSURE

    def ended(self, request: Request) -> None:
        """As Source.ended: nothing is kept."""
