"""A client's grammar made into what nodes follow, or what is wrong with it."""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark
from msgspec import Struct

from pdserve.errors import GrammarFailed
from pdserve.grammar.matching import MAX_GRAMMAR_CHARS, check, new_matcher
from pdserve.grammar.size import excess
from pdserve.grammar.vocabulary import Vocabulary

GBNF = "gbnf_grammar"  # in the place of the library's own kinds: it is translated


class Prepared(Struct, frozen=True):
    """What became of a grammar: either it can be followed, or there is something wrong with it."""

    grammar: str = ""
    fault: str = ""  # may be in the library's words


def prepare(vocabulary: Vocabulary, document: str) -> Prepared:
    """May take for ever; so it is done in a process of its own (`child.py`).

    Args:
        vocabulary: which token ends an answer makes no difference.
        document: `{"grammars": [..]}` in the library's form, GBNF besides.
    """
    try:
        grammar = _translated(document)
    except Exception as error:  # noqa: BLE001  the translator has no errors of its own
        return Prepared(fault=f"it is not valid GBNF: {error}")
    fault = _size_fault(grammar) or _fault(vocabulary, grammar)
    return Prepared(fault=fault) if fault else Prepared(grammar)


def _translated(document: str) -> str:
    parts: list[dict[str, Any]] = json.loads(document)["grammars"]
    if not any(GBNF in part for part in parts):
        return document
    for part in parts:
        if GBNF in part:
            part["lark_grammar"] = str(any_to_lark(part.pop(GBNF)))
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _size_fault(grammar: str) -> str:
    if len(grammar) <= MAX_GRAMMAR_CHARS:
        return excess(grammar) or ""
    return f"it makes a grammar of {len(grammar)} characters; at most {MAX_GRAMMAR_CHARS} are taken"


def _fault(vocabulary: Vocabulary, grammar: str) -> str:
    """Why it cannot be followed; empty: it can, behind a first token at least."""
    try:
        matcher = new_matcher(vocabulary, grammar)
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        check(matcher)
        if not mask:
            return "no token can begin it"
        matcher.consume_token((mask & -mask).bit_length() - 1)
        if not matcher.is_stopped():
            matcher.compute_bitmask()
        check(matcher)
    except GrammarFailed as error:
        return error.message
    return ""
