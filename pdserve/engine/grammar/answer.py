"""One constrained answer: its position, what its masks take, and its drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pdserve.engine.grammar.ahead import MaskAhead
from pdserve.engine.grammar.position import Position
from pdserve.engine.request import Request
from pdserve.grammar import CompiledGrammar
from pdserve.shared.errors import GrammarFailed


@dataclass(slots=True, eq=False)
class Answer:
    """A request and its position. Used by one thread at a time."""

    request: Request
    position: Position
    is_light: bool  # computing its mask takes less time than waking a thread
    cost_s: float | None = None  # CPU time of its last mask; None: none was computed here
    spent_s: float = 0.0  # beside steps
    ahead: MaskAhead | None = None
    may_have_drafts: bool = field(init=False)

    def __post_init__(self) -> None:
        """Set up what follows from other fields."""
        self.may_have_drafts = self.is_light

    @classmethod
    def of(cls, request: Request) -> Answer:
        """At the beginning of its grammar: it goes to where the request is when it is asked."""
        return cls(request, _new_position(request), grammar_of(request).is_light)

    def has_mask(self) -> bool:
        """Whether its next mask was computed beside the steps, or cannot be."""
        ahead = self.ahead
        if ahead is not None and ahead.num_tokens != len(self.request.output_token_ids):
            ahead = self.ahead = None  # of a place that it has left
        return ahead is not None and ahead.is_done

    def write(self, bits: npt.NDArray[np.int32]) -> None:
        """Advance by the request's new tokens, and write the next mask. Raises GrammarFailed."""
        self._advance()
        self.position.fill(bits)

    # ---- drafts --------------------------------------------------------------------------------

    def write_ahead(self, bits: npt.NDArray[np.int32]) -> None:
        """Write the masks behind the request's drafts; none is allowed where one is not known.

        To be called after `write`.
        """
        try:
            self.position.fill_ahead(self.request.draft, bits)
        except GrammarFailed:
            self.may_have_drafts = False

    def allowed(self, token_ids: Sequence[int]) -> Sequence[int]:
        """Return the first of these tokens, as far as they may come next."""
        try:
            self._advance()
            return token_ids[: self.position.num_allowed(token_ids)]
        except GrammarFailed:
            self._start_anew()  # if it is at fault itself, its next mask says so
            return ()

    def forced(self) -> Sequence[int]:
        """Return the tokens that must come next."""
        try:
            self._advance()
            return self.position.forced()
        except GrammarFailed:
            self._start_anew()
            return ()

    def _advance(self) -> None:
        position = self.position
        position.advance(self.request.output_token_ids[position.num_tokens :])

    def _start_anew(self) -> None:
        self.position = _new_position(self.request)
        self.may_have_drafts = False


def grammar_of(request: Request) -> CompiledGrammar:
    """Return its grammar, which it has."""
    assert request.grammar is not None, "a request is submitted with its grammar compiled"
    return request.grammar


def _new_position(request: Request) -> Position:
    return Position(grammar_of(request), request.sampling.stop_token_ids)
