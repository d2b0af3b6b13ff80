"""The position of one answer in its grammar."""

from __future__ import annotations

from collections.abc import Collection

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
        else:
            self._matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            check(self._matcher)
        if self._end_ids and self._matcher.is_accepting():
            for token_id in self._end_ids:
                bits.view(np.uint32)[token_id // WORD_BITS] |= np.uint32(1 << token_id % WORD_BITS)
        if not bits.any():
            raise GrammarFailed("no token of this model can follow in the grammar")
