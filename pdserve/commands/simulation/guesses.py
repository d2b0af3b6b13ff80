"""Drafts of simulated nodes: of every stream something is guessed, as often right as measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Final

from pdserve.engine.request import Request

_WRONG: Final = -1
_UNSURE: Final = 0  # how often it is right is learnt, as nodes do


class PlayedGuesses:
    """Implements `pdserve.engine.drafts.source.Source`."""

    name = "played"

    def __init__(self, right: float, seed: str, token: Callable[[Request, int], int]) -> None:
        """
        Args:
            right: share of right tokens among those guessed behind right ones.
            seed: of which.
            token: what a request will say next, or so many tokens later.
        """
        self._right = right
        self._random = Random(seed)
        self._token = token

    def drafter(self, request: Request) -> PlayedGuesses:
        """As Source.drafter: one for all streams."""
        return self

    def propose(self, request: Request, most: int) -> tuple[Sequence[int], int]:
        """As Drafter.propose."""
        drafts: list[int] = []
        while len(drafts) < most and _WRONG not in drafts[-1:]:
            is_right = self._random.random() < self._right
            drafts.append(self._token(request, len(drafts)) if is_right else _WRONG)
        return drafts + [_WRONG] * (most - len(drafts)), _UNSURE

    def ended(self, request: Request) -> None:
        """As Source.ended: nothing is kept."""
