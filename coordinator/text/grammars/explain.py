"""Translates the grammar library's errors into messages that say what a client can change."""

from __future__ import annotations

import json
import re

from pdserve.grammar.matching import first_words

_KEYWORDS = re.compile(r"Unimplemented keys: (\[.*?\])(?:$|\n| )", re.DOTALL)
_MAX_CHARS = 500

# text in the library's error |-> explanation
_PLAIN = (
    (
        "oneOf constraints are not supported",
        "unsupported JSON schema keyword: 'oneOf', unless it is plain that no two of its schemas "
        "have a value in common; 'anyOf' is supported",
    ),
    ("NoExtensionBias", "no text matches it"),
    ("Unknown format", "unsupported JSON schema keyword: 'format' with such a value"),
    ("retrieving it failed", "unsupported JSON schema keyword: '$ref' to another document"),
)


def explain(complaint: str) -> str:
    """Return a one-line explanation; unknown errors are passed on as they are."""
    complaint = first_words(complaint)
    if found := _KEYWORDS.search(complaint):
        keywords = ", ".join(repr(keyword) for keyword in json.loads(found[1]))
        return f"unsupported JSON schema keywords: {keywords}"
    for said, means in _PLAIN:
        if said in complaint:
            return f"{means} ({_one_line(complaint)})"
    return _one_line(complaint)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_CHARS else line[:_MAX_CHARS] + "..."
