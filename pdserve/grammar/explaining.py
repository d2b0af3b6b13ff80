"""Says in words of clients what the grammar library says in its own."""

from __future__ import annotations

import re

_MAX_CHARS = 300

# What is in the library's message |-> what it means; groups are filled in.
_MEANINGS = tuple(
    (re.compile(said, re.DOTALL), means)
    for said, means in (
        (r"regex parse error:.*\nerror: ([^\n]*)", "regular expression: {}"),
        (r"lookarounds not supported", "regular expression: look-around is not supported"),
        (r"NoExtensionBias", "no text matches it"),
        (
            r"oneOf constraints",
            "'oneOf' is supported only if it is plain that no two of its schemas have a value in "
            "common; 'anyOf' is supported",
        ),
        (r"are not disjoint", "two of 'patternProperties' match the same name: not supported"),
        (r"[Uu]nsatisfiable|Regex is empty|range .* does not contain", "no value matches it"),
        (r"determine if regex is empty", "'pattern', with what else is asked, is too complex"),
        (r"circular references", "a '$ref' to itself beside other keywords is not supported"),
        (r"retrieving it failed", "a '$ref' to another document is not supported"),
        (r"stack level|too deeply nested", "it is nested too deeply"),
        (r"row has (\d+) items; max is (\d+)", "it has {} alternatives at once; at most {} fit"),
        (r"no start rule", "it has no rule 'start'"),
        (r"too (big|large|many)|[Ll]imit|[Ff]uel|exceeded", "it is too large or too complex"),
    )
)
_QUOTED = re.compile(r'"[^"]*"')
_POSITION = re.compile(r"(?:at )?(\d+)\((\d+)\): (?:at EOF: )?([^\n;]*)")
_TRANSLATED = "%llguidance"  # is in what the library makes of GBNF: its positions are not ours
# Words that mean something only to who knows the library.
_INNER = re.compile(
    r"guidance|derivre|toktrie|serde|\blark|Bias|lexer|lexeme|earley|grammar_builder|::|[a-z]_[a-z]"
    r"|\bexpr(?!ess)|\.rs\b|panick|unwrap",
    re.IGNORECASE,
)


def explain(complaint: str) -> str:
    """Return a one-line explanation."""
    complaint = complaint.partition("<state>")[0].partition("<non-verbose/>")[0].strip()
    for said, means in _MEANINGS:
        if found := said.search(complaint):
            return _short(means.format(*found.groups()))
    if found := _POSITION.match(complaint):
        line, column, reason = found.groups()
        where = "" if _TRANSLATED in complaint else f"line {line}, column {column}: "
        return where + _plain(reason.partition(" (at ")[0])
    return _plain(complaint)


def _plain(text: str) -> str:
    own = _QUOTED.sub("", text)  # without what the client wrote
    return "it cannot be read" if _INNER.search(own) else _short(text)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARS else line[:_MAX_CHARS] + "..."
