"""Grammars for constrained decoding, over the vocabulary of a tokenizer.

A grammar is text in llguidance's language: Lark rules, JSON schemas and regular expressions, or
several of them combined in one JSON document. Coordinators create and check grammars, and nodes
apply them during decoding; both use this package, with the same limits.
"""

from __future__ import annotations

from pdserve.grammar.compiled import CompiledGrammar, compile_grammar
from pdserve.grammar.deep_threads import DeepThreads
from pdserve.grammar.matching import MAX_GRAMMAR_CHARS, is_light, new_matcher, too_long
from pdserve.grammar.preparing import Prepared
from pdserve.grammar.vocabulary import Vocabulary, load_vocabulary, make_vocabulary

__all__ = [
    "MAX_GRAMMAR_CHARS",
    "CompiledGrammar",
    "DeepThreads",
    "Prepared",
    "Vocabulary",
    "compile_grammar",
    "is_light",
    "load_vocabulary",
    "make_vocabulary",
    "new_matcher",
    "too_long",
]
