"""Translates and checks a client's grammar before nodes use it."""

from __future__ import annotations

import json
from typing import Any

from llguidance.gbnf_to_lark import any_to_lark
from msgspec import Struct

from pdserve.grammar.locating import SchemaSearch
from pdserve.grammar.matching import check, new_matcher, too_long
from pdserve.grammar.size import excess
from pdserve.grammar.vocabulary import Vocabulary
from pdserve.shared.errors import GrammarFailed

GBNF = "gbnf_grammar"  # our own key beside the library's kinds of grammar: it is translated


class Prepared(Struct, frozen=True):
    """The result of preparing a grammar: either a usable grammar or a fault."""

    grammar: str = ""
    fault: str = ""
    part: str = ""  # the name of the grammar that has the fault, if it is known
    pointer: str = ""  # into its JSON schema, likewise


def prepare(vocabulary: Vocabulary, document: str) -> Prepared:
    """Translate and check a grammar. May run forever, so call it in a subprocess (`child.py`).

    Args:
        vocabulary: its end-of-sequence tokens do not matter here.
        document: `{"grammars": [..]}` in the library's form, or with GBNF grammars.
    """
    try:
        grammar = _translated(document)
    except Exception as error:  # noqa: BLE001  the translator has no errors of its own
        return Prepared(fault=f"it is not valid GBNF: {error}")
    if fault := too_long(grammar) or excess(grammar):
        return Prepared(fault=fault)
    if fault := _fault(vocabulary, grammar):
        part, pointer = SchemaSearch(vocabulary, grammar).place()
        return Prepared(fault=fault, part=part, pointer=pointer)
    return Prepared(grammar)


def _translated(document: str) -> str:
    parts: list[dict[str, Any]] = json.loads(document)["grammars"]
    if not any(GBNF in part for part in parts):
        return document
    for part in parts:
        if GBNF in part:
            part["lark_grammar"] = str(any_to_lark(part.pop(GBNF)))
    return json.dumps({"grammars": parts}, ensure_ascii=False)


def _fault(vocabulary: Vocabulary, grammar: str) -> str:
    """Return why the grammar cannot be used; empty if at least a first token can be matched."""
    try:
        matcher = new_matcher(vocabulary, grammar)
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        check(matcher)
        if not mask:
            return "no token of the model can begin such an answer"
        matcher.consume_token((mask & -mask).bit_length() - 1)
        if not matcher.is_stopped():
            matcher.compute_bitmask()
        check(matcher)
    except GrammarFailed as error:
        return error.message
    return ""
