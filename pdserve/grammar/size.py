"""Limits on the expanded size of a grammar, where the library's own limits come too late.

The library's fuel does not count nested repetitions, nor `multipleOf` with large numbers: a single
line of text can occupy a thread for minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from math import isfinite
from typing import Any

MAX_REPETITIONS = 200_000  # product of nested counts; takes about two seconds
MAX_MULTIPLE = 100_000

_TOKENS = re.compile(
    r"\\.|\[(?:\\.|[^\]\\]){1,256}\]"  # escapes and character classes; their content is ignored
    r"|(?P<open>\()|(?P<close>\))"
    r"|\{\s{0,4}(?P<least>\d{0,9})\s{0,4}(?:,\s{0,4}(?P<most>\d{0,9})\s{0,4})?\}",
    re.DOTALL,
)


def excess(grammar: str) -> str | None:
    """Return why the grammar would take too long to prepare, or None if no reason is found."""
    for key, value in _members("", json.loads(grammar)):
        for text in (key, value):
            if isinstance(text, str) and _nested_repetitions(text) > MAX_REPETITIONS:
                return f"repetitions inside of each other make more than {MAX_REPETITIONS}"
        if key == "multipleOf" and isinstance(value, int | float) and _is_large(value):
            return f"'multipleOf' is {value}; at most {MAX_MULTIPLE} is supported"
    return None


def _members(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) at any depth; items of a list have the name of the list."""
    yield key, value
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _members(name, one)
    elif isinstance(value, list):
        for one in value:
            yield from _members(key, one)


def _is_large(multiple: float) -> bool:
    """Whether the numerator of the number as a fraction is too large; 0.01 is 1/100."""
    return not isfinite(multiple) or Fraction(repr(multiple)).numerator > MAX_MULTIPLE


def _nested_repetitions(grammar: str) -> int:
    """Return the largest number of repetitions that any repeated group expands to."""
    open_groups = [0]  # repetitions in each open group so far, the innermost last
    # Repetitions in the group just closed; the maximum so far; the end of the previous token.
    closed, most, end = 0, 0, 0
    for token in _TOKENS.finditer(grammar):
        is_behind_group, end = closed > 0 and token.start() == end, token.end()
        inner, closed = closed, 0
        if token["open"]:
            open_groups.append(0)
        elif token["close"]:
            closed = open_groups.pop() if len(open_groups) > 1 else 0
            open_groups[-1] += closed
        elif token["least"] or token["most"]:
            count = int(token["least"] or 0) or 1  # only mandatory repetitions are expanded
            if is_behind_group:
                open_groups[-1] += (count - 1) * inner
                most = max(most, count * inner)
                closed = count * inner  # (a{9}){9}{9}
            else:
                open_groups[-1] += count
                closed = count
    return most
