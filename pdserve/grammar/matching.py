"""Following a grammar token by token, within limits of time and memory."""

from __future__ import annotations

import re

import llguidance

from pdserve.errors import GrammarFailed
from pdserve.grammar.vocabulary import Vocabulary

# Far more than grammars have that are written by hand. More recursion than this allows would need a
# deeper stack (`deep_threads.py`).
MAX_GRAMMAR_CHARS = 64 * 1024

# In the library's units: 50 of a lexer's fuel take about a microsecond when it is built, 14 of it
# and 20 items when a mask is computed. A state takes up to 2 kB. Large lexemes are not walked in
# advance: that would cost each request what few of its masks gain.
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


_LIGHT_CHARS = 4096  # a chain of references in so many is shallow enough for an ordinary stack
_LIGHT_REPETITIONS = 200_000
_COUNTED = re.compile(  # {3} {3,} {,4} {3,4}, and Lark's ~3 ~3..4
    r"\{\s*(\d+)?\s*(?:,\s*(\d+)?\s*)?\}|~\s*(\d+)(?:\s*\.\.\s*(\d+))?"
)


def is_light(grammar: str) -> bool:
    """Whether no mask of it can take long, once its matcher is made.

    Fuel bounds a mask, but for counted repetitions: nested in each other, they are written out at
    once. As if all of them were nested.
    """
    if len(grammar) > _LIGHT_CHARS:
        return False
    product = 1
    for counts in _COUNTED.findall(grammar):
        product *= max(int(count or 1) for count in counts) or 1
    return product <= _LIGHT_REPETITIONS


def new_matcher(vocabulary: Vocabulary, grammar: str) -> llguidance.LLMatcher:
    """At the beginning of an answer. The interpreter lock is released meanwhile.

    Raises:
        GrammarFailed: it is none, or is too much; says why.
    """
    matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=_LIMITS)
    check(matcher)
    return matcher


def check(matcher: llguidance.LLMatcher) -> None:
    """Raises GrammarFailed: it can follow no further."""
    if matcher.is_error():
        raise GrammarFailed(first_words(matcher.get_error()))


def first_words(error: str) -> str:
    """The library's message without the state of its parser."""
    return error.partition("<state>")[0].partition("<non-verbose/>")[0].strip()
