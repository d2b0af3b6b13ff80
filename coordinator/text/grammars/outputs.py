"""The kinds of structured output, each as one grammar of a document."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

import llguidance

from coordinator.text.grammars.schemas import enforceable
from pdserve.grammar.preparing import GBNF
from pdserve.shared.errors import InvalidRequest

Part: TypeAlias = dict[str, Any]  # one grammar of a document, in the library's own format

# Allowed once between two JSON tokens: what JSON printers write, indented or not. If any amount
# were allowed, a model that has begun to write whitespace might never stop.
_SPACE = r"\x20|\n(\x20{0,32}|\t{0,16})"
# Not `u`: there must be one way to spell a key, or one that is listed could come as another one.
_ESCAPES = 'nrbtf\\"'
_OPTIONS = "x-guidance"  # where the library looks for its own options in a schema


class OutputKind(StrEnum):
    """The language that the client's grammar is written in."""

    JSON = "json"  # a JSON schema
    REGEX = "regex"  # of the whole answer
    CHOICE = "choice"  # a list of answers
    LARK = "grammar"  # or GBNF


@dataclass(frozen=True, slots=True)
class Output:
    """The structured output that a client has asked for."""

    kind: OutputKind
    value: Any  # a schema, a list of strings, or the text of a regex or grammar
    param: str  # the request's parameter, for errors

    def part(self) -> Part:
        """Return the grammar. Raises InvalidRequest."""
        match self.kind:
            case OutputKind.JSON:
                return json_part(self.value, self.param)
            case OutputKind.REGEX:
                return _regex_part(self.value)
            case OutputKind.CHOICE:
                # One terminal, since the library limits the alternatives of rules it follows.
                answers = " | ".join(map(quoted, dict.fromkeys(self.value)))
                return {"lark_grammar": f"start: ANSWER\nANSWER: {answers}"}
            case OutputKind.LARK:
                is_gbnf = "::=" in self.value
                return {GBNF if is_gbnf else "lark_grammar": self.value}


def json_part(schema: Any, param: str) -> Part:
    """Return the grammar of a JSON schema's values in any usual layout. Raises InvalidRequest."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest("no JSON value matches the schema 'false'", param)
    options = {"whitespace_pattern": _SPACE, "json_allowed_escapes": _ESCAPES}
    return {"json_schema": enforceable(schema, param) | {_OPTIONS: options}}


def quoted(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def text_up_to(mark: str) -> str:
    """Return a regex of Lark for text that ends with a mark; it is to be matched lazily."""
    return f"/(.|\\n)*{_escaped(mark)}/"


def text_that_ends(end: str, least: int = 0, most: int | None = None) -> str:
    """Return an expression of Lark for text that ends with a mark, of which no line is inside.

    The text before the mark has `least` to `most` characters.
    """
    bare = _escaped(end.lstrip("\n"))
    length = f"{{{least},{'' if most is None else most}}}"
    return f"/(.|\\n){length}{_escaped(end)}/ & ~/(?s:.*){bare}(?s:.+)/"


def text_without(mark: str) -> str:
    """Return an expression of Lark for any text that a mark does not occur in."""
    return f"/(.|\\n)*/ & ~/(?s:.*){_escaped(mark)}(?s:.*)/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")


def _regex_part(regex: str) -> Part:
    document = json.loads(llguidance.LLMatcher.grammar_from_regex(regex))
    return {"lark_grammar": document["grammars"][0]["lark_grammar"]}
