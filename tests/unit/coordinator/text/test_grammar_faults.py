"""What is said of grammars that cannot be used: in words of clients, not of the library."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
import pytest

from coordinator.text.grammars.outputs import json_part
from pdserve.grammar import MAX_GRAMMAR_CHARS
from pdserve.grammar.explaining import explain
from pdserve.grammar.preparing import GBNF, prepare
from pdserve.shared.errors import PdserveError
from tests.unit.coordinator.text.enforced import Enforced, vocabulary

INNER = re.compile(
    r"guidance|derivre|toktrie|serde|\blark\b|Bias|lexer|lexeme|earley|coerce_one_of|Unimplemented"
    r"|ParserLimits|\bexpr(?!ess)|::(?!=)|\n",
    re.IGNORECASE,
)

# fmt: off
LARK = [
    "", "nothing", "start: b", 'start: "a', "start: /(/", "start: /(?=a)/", "start: a\na: a",
    'start: %json {"type": "x"}', "start: %json {", "start: <[99999]>", "start: <nope>",
    "start: @x",
    'start: "a"{5,2}', 'start[foo=1]: "a"', "start: /a/ & ~/a/", "A: /a/\nA: /b/\nstart: A",
    "start: A\nA: B\nB: A", 'start: "a" ->', "start: (", 'start: %regex {"substring_chars": 3}',
    "start: %lark { start: b }", '%ignore /(/\nstart: "a"', 'start: a\na[stop=3]: "x"',
    "start: /[z-a]/", "start: %llguidance {}", "start: 'a'", "start: ~a", 'start: "\\uD800"',
    "start: /(?<n>a)\\k<n>/", "start: /\\p{Foo}/", "start: A.5\nA: /x/", "start: 5",
    "start: " + "(" * 300 + '"a"' + ")" * 300, "start: /[^\\s\\S]/", "start: @self",
    "start: my_rule",
    'start: %json {"x-guidance": {"bogus": 1}}', "%declare X\nstart: X", "start: %unknown {}",
    'start: "' + "a" * MAX_GRAMMAR_CHARS + '"',
    "start: " + " | ".join(f'"a" "{i}"' for i in range(3000)),
    "start: /\\b/", "start: /(a{1000}){1000}/",
]
GRAMMAR_BNF = [
    "root ::= (", "root ::= b", 'root ::= "a', "root ::= [a", "root ::= a\na ::= a", 'x ::= "a"',
    'root ::= "a"{3,1}', "root ::= [z-a]", "::=", 'root ::= "\\xZZ"', "root ::= . ^",
]
REGEXES = [
    "(", "(?=a)", "\\1", "[z-a]", "\\p{Foo}", "(?P<a", "a{5,2}", "(?i:a", "$^", "\\b", "(?>a)",
    "[^\\s\\S]", "\\u{110000}", "\\xZ",
]
SCHEMAS: list[dict[str, Any]] = [
    {"oneOf": [{}, {}]}, {"oneOf": [{"type": "number"}, {"type": "integer"}]}, {"pattern": "("},
    {"patternProperties": {"a": {"multipleOf": 2}, "^a": {"multipleOf": 3}}},
    {"allOf": [{"type": "string"}, {"type": "null"}]},
    {"type": "string", "pattern": "^a$", "minLength": 2},
    {"allOf": [{"pattern": "^a$"}, {"pattern": "^b$"}], "type": "string"}, {"pattern": "\\cC"},
    {"required": ["a"], "properties": {"a": False}, "type": "object"},
    {"maxItems": 10**6, "type": "array"},
    {"$ref": "#"}, {"$ref": "#", "minimum": 3}, {"enum": ["a"], "const": "b"}, {"not": {}},
    {"$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}, {"type": "object"}]}}, "$ref": "#/$defs/a"},
    {"type": "number", "minimum": 0.1, "maximum": 0.1000001, "multipleOf": 0.5}, {"items": 3},
]
# fmt: on


def told(part: dict[str, Any]) -> str:
    return prepare(vocabulary(), json.dumps({"grammars": [part]})).fault


@pytest.mark.parametrize("kind", ["lark_grammar", GBNF, "regex"])
def test_faults_of_grammars_are_told_without_inner_names(kind: str) -> None:
    texts = {"lark_grammar": LARK, GBNF: GRAMMAR_BNF, "regex": REGEXES}[kind]
    for text in texts:
        part = {kind: text}
        if kind == "regex":
            part = json.loads(llguidance.LLMatcher.grammar_from_regex(text))["grammars"][0]
        fault = told(part)
        assert fault, text
        assert not INNER.search(fault.replace(text, "")), (text[:80], fault)
        assert len(fault) < 400


def test_faults_of_schemas_are_told_without_inner_names() -> None:
    num_refused = 0
    for schema in SCHEMAS:
        for whole in (schema, {"type": "array", "items": schema, "minItems": 1}):
            try:
                made = Enforced(whole)
            except PdserveError as error:
                fault = error.message
            else:
                fault = told(json.loads(made.grammar)["grammars"][0])
            num_refused += bool(fault)
            assert not INNER.search(fault), (schema, fault)
    assert num_refused > len(SCHEMAS), "most of them"


def test_what_is_not_known_is_not_passed_on() -> None:
    for complaint in (
        "panicked at src/earley/parser.rs:12",
        "thread 'x' called `Option::unwrap()` on a `None` value",
        'lexeme_idx missing for "client text"',
        "at 3(1): bad RegexAst::Expr in grammar_builder\n   1 | start",
    ):
        assert not INNER.search(explain(complaint))
    assert "my_rule" in told({"lark_grammar": "start: my_rule"})


def test_the_schema_inside_that_is_at_fault_is_found() -> None:
    bad = {"type": "string", "pattern": "\\cC"}
    for schema, pointer in (
        (bad, "#"),
        ({"properties": {"a/b": {"items": bad}}, "type": "object"}, "#/properties/a~1b/items"),
        ({"$defs": {"x": bad}, "items": {"$ref": "#/$defs/x"}, "type": "array"}, "#/$defs/x"),
    ):
        part = {"name": "arguments_1"} | json_part(schema, "p")
        start = {"lark_grammar": "start: @arguments_0 | @arguments_1"}
        good = {"name": "arguments_0"} | json_part({}, "p")
        document = json.dumps({"grammars": [start, good, part]})
        found = prepare(vocabulary(), document)
        assert (found.part, found.pointer) == ("arguments_1", pointer)
