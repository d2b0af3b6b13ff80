"""Drafts of answers that have a grammar: what it allows of them, and what it forces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from pdserve.engine.drafts.source import Drafter
from pdserve.engine.request import Request

_SURE: Final = 64  # nothing else is allowed


class DraftMasks(Protocol):
    """What drafts need of `grammar.GrammarProgress`, which says more."""

    def allowed(self, request: Request, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the first of these tokens, as far as they may come next."""

    def forced(self, request: Request, most: int) -> Sequence[int]:
        """Return at most so many tokens that must come next."""

    def mask_s(self, request: Request) -> float:
        """Return what a mask is predicted to take in the step."""

    def afford(self, request: Request, num_drafts: int) -> int:
        """Return for how many of these there is time in the step, and spend it."""


class ForcedTokens:
    """The tokens that a grammar forces: names and marks of JSON, say. Implements `Source`."""

    name = "grammar"

    def __init__(self, masks: DraftMasks) -> None:
        self._masks = masks

    def drafter(self, request: Request) -> Drafter | None:
        """As Source.drafter."""
        return None if request.grammar is None else self

    def propose(self, request: Request, most: int) -> tuple[Sequence[int], int]:
        """As Drafter.propose: one for all streams."""
        return self._masks.forced(request, most), _SURE

    def ended(self, request: Request) -> None:
        """As Source.ended."""
