"""A grammar that is ready to be followed."""

from __future__ import annotations

from dataclasses import dataclass

import llguidance
import numpy as np

from pdserve.grammar.matching import is_light, new_matcher
from pdserve.grammar.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """A grammar over a vocabulary, for one answer, or for token 1 of several.

    Copies of a matcher share the states that they have found, whose number is limited. At the
    beginning these are the same for all answers. But if whole answers shared one, those of many
    would make it fail for all later ones.
    """

    vocabulary: Vocabulary
    matcher: llguidance.LLMatcher  # at the beginning of the answer
    is_light: bool  # no mask can take long
    first_mask: bytes = b""  # of token 1, which all answers of a call share; empty: not known


def compile_grammar(vocabulary: Vocabulary, grammar: str) -> CompiledGrammar:
    """Compile a grammar; large ones take a good part of a second.

    Needs a deep stack (`DeepThreads`), unless the grammar is light.

    Raises:
        GrammarFailed: the grammar is invalid or exceeds a limit; says why.
    """
    matcher = new_matcher(vocabulary, grammar)
    first = np.zeros(-(-vocabulary.vocab_size // 32), dtype=np.int32)
    copy = matcher.deep_copy()
    copy.unsafe_compute_mask_ptr(first.ctypes.data, first.nbytes)
    mask = b"" if copy.is_error() else first.tobytes()  # who asks for it next is told the error
    return CompiledGrammar(vocabulary, matcher, is_light(grammar), mask)
