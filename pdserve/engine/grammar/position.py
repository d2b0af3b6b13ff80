"""The position of one answer in its grammar."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import llguidance
import numpy as np
import numpy.typing as npt

from pdserve.engine.grammar.masks import WORD_BITS
from pdserve.grammar import CompiledGrammar
from pdserve.grammar.matching import check
from pdserve.shared.errors import GrammarFailed


class Position:
    """A matcher and the number of tokens it has consumed. Used by one thread at a time."""

    def __init__(self, grammar: CompiledGrammar, end_ids: Collection[int]) -> None:
        """Start at the beginning of an answer.

        Args:
            grammar: its vocabulary's own end tokens are allowed where it is complete.
            end_ids: further tokens to allow there: stop tokens.
        """
        self._matcher: llguidance.LLMatcher = grammar.matcher.deep_copy()
        self._first = grammar.first_mask
        self._end_ids = [i for i in end_ids if i < grammar.vocabulary.vocab_size]
        self.num_tokens = 0

    def advance(self, token_ids: list[int]) -> None:
        """Consume the answer's next tokens. Raises GrammarFailed if they do not match."""
        if token_ids and not self._matcher.consume_tokens(token_ids):
            check(self._matcher)
            raise GrammarFailed("the tokens so far do not match the grammar")
        self.num_tokens += len(token_ids)

    def fill(self, bits: npt.NDArray[np.int32]) -> None:
        """Write the mask of the tokens that are allowed next.

        Args:
            bits: [num_words], contiguous.

        Raises:
            GrammarFailed: the mask exceeds a limit, or no token is allowed.
        """
        if self.num_tokens == 0 and self._first:
            bits[:] = np.frombuffer(self._first, dtype=np.int32)
            self._allow_ends(self._matcher, bits)
        else:
            self._fill(self._matcher, bits)

    # ---- drafts: tokens that may come, along which a copy goes ---------------------------------

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many of these may come next, one after the other. Raises GrammarFailed."""
        num_allowed: int = self._matcher.validate_tokens(list(token_ids))
        check(self._matcher)
        return num_allowed

    def forced(self) -> list[int]:
        """Return the tokens that must come next, since no others may; often there are none."""
        tokens: list[int] = self._matcher.compute_ff_tokens()
        check(self._matcher)
        return tokens

    def fill_ahead(self, token_ids: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
        """Write the mask behind each of these tokens; none is allowed where an answer has ended.

        Args:
            token_ids: [num_tokens] that may come next.
            bits: [num_tokens, num_words], zeros.

        Raises:
            GrammarFailed: as `fill`.
        """
        # Rolled back, llguidance 1.9.1 may take what comes then for what was there: a value's
        # string, say, for the name that a draft had begun.
        matcher = self._matcher.deep_copy()
        for token_id, mask in zip(token_ids, bits, strict=True):
            if not matcher.consume_token(token_id) or matcher.is_stopped():
                break
            self._fill(matcher, mask)

    def _fill(self, matcher: llguidance.LLMatcher, bits: npt.NDArray[np.int32]) -> None:
        matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        check(matcher)
        self._allow_ends(matcher, bits)

    def _allow_ends(self, matcher: llguidance.LLMatcher, bits: npt.NDArray[np.int32]) -> None:
        if self._end_ids and matcher.is_accepting():
            for token_id in self._end_ids:
                bits.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        if not bits.any():
            raise GrammarFailed("no token of this model can follow in the grammar")
