"""Matching tokens against a grammar, within limits of time and memory."""

from __future__ import annotations

import re

import llguidance

from pdserve.grammar.explaining import explain
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.shared.errors import GrammarFailed

# Far more than hand-written grammars have. A higher limit would allow deeper recursion, and so
# would need a deeper stack (`deep_threads.py`).
MAX_GRAMMAR_CHARS = 64 * 1024


def too_long(grammar: str) -> str:
    """Return why a grammar has too many characters; empty: it has not."""
    if len(grammar) <= MAX_GRAMMAR_CHARS:
        return ""
    return f"its grammar has {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are allowed"


# In the library's units. A microsecond corresponds to about 50 units of lexer fuel when the lexer
# is built, and to 14 units of fuel or 20 items when a mask is computed. A state takes up to 2 kB.
# Large lexemes are not precomputed: each request would pay for it, and few masks would gain.
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_items_in_row=2_000,
    max_lexer_states=20_000,
    max_grammar_size=200_000,
    precompute_large_lexemes=False,
    verbose_errors=False,
)


_LIGHT_CHARS = 4096  # reference chains in grammars up to this size fit into an ordinary stack
_LIGHT_REPETITIONS = 200_000
# {3} {3,} {,4} {3,4}, and Lark's ~3 ~3..4. Possessive quantifiers: a text of spaces must not make
# the search backtrack, which would hold the interpreter lock for minutes.
_COUNTED = re.compile(r"\{\s*+(\d*+)\s*+(?:,\s*+(\d*+)\s*+)?\}|~\s*+(\d++)(?:\s*+\.\.\s*+(\d++))?")


def is_light(grammar: str) -> bool:
    """Whether no mask of this grammar can take long, once its matcher exists.

    Fuel bounds the cost of a mask, except for nested counted repetitions, which are expanded at
    once. This check is conservative: it treats all repetitions as nested.
    """
    if len(grammar) > _LIGHT_CHARS:
        return False
    product = 1
    for counts in _COUNTED.findall(grammar):
        product *= max(int(count or 1) for count in counts) or 1
    return product <= _LIGHT_REPETITIONS


def new_matcher(vocabulary: Vocabulary, grammar: str) -> llguidance.LLMatcher:
    """Create a matcher at the beginning of an answer. Releases the interpreter lock meanwhile.

    Raises:
        GrammarFailed: the grammar is invalid or exceeds a limit; says why.
    """
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    check(matcher)
    return matcher


def check(matcher: llguidance.LLMatcher) -> None:
    """Raise GrammarFailed if the matcher is in an error state and cannot continue."""
    if matcher.is_error():
        raise GrammarFailed(explain(matcher.get_error()))
