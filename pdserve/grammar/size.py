"""What a grammar would be written out to, where the library's own limits come too late.

Its fuel does not count repetitions inside of each other, nor multiples of large numbers: a line of
text can hold a thread for minutes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
from math import isfinite
from typing import Any

MAX_REPETITIONS = 200_000  # of what is nested: about two seconds
MAX_MULTIPLE = 100_000

_TOKENS = re.compile(
    r"\\.|\[(?:\\.|[^\]\\]){1,256}\]"  # escapes and classes of characters, in which nothing counts
    r"|(?P<open>\()|(?P<close>\))"
    r"|\{\s{0,4}(?P<least>\d{0,9})\s{0,4}(?:,\s{0,4}(?P<most>\d{0,9})\s{0,4})?\}",
    re.DOTALL,
)


def excess(grammar: str) -> str | None:
    """Why it would take too long to prepare; None: nothing of the kind is seen in it."""
    for key, value in _members("", json.loads(grammar)):
        for text in (key, value):
            if isinstance(text, str) and _nested_repetitions(text) > MAX_REPETITIONS:
                return f"repetitions inside of each other make more than {MAX_REPETITIONS}"
        if key == "multipleOf" and isinstance(value, int | float) and _is_large(value):
            return f"'multipleOf' is {value}; at most {MAX_MULTIPLE} is supported"
    return None


def _members(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What there is at any depth, by its name; that of a list for its items."""
    yield key, value
    if isinstance(value, dict):
        for name, one in value.items():
            yield from _members(name, one)
    elif isinstance(value, list):
        for one in value:
            yield from _members(key, one)


def _is_large(multiple: float) -> bool:
    """As a fraction: 0.01 is a hundredth."""
    return not isfinite(multiple) or Fraction(repr(multiple)).numerator > MAX_MULTIPLE


def _nested_repetitions(grammar: str) -> int:
    """The most that any repeated group makes of the repetitions in it."""
    open_groups = [0]  # repetitions in each so far, the innermost last
    closed, most, end = 0, 0, 0  # in the group that has just been closed; where the last token was
    for token in _TOKENS.finditer(grammar):
        is_behind_group, end = closed > 0 and token.start() == end, token.end()
        inner, closed = closed, 0
        if token["open"]:
            open_groups.append(0)
        elif token["close"]:
            closed = open_groups.pop() if len(open_groups) > 1 else 0
            open_groups[-1] += closed
        elif token["least"] or token["most"]:
            count = int(token["least"] or 0) or 1  # only what must come is written out
            if is_behind_group:
                open_groups[-1] += (count - 1) * inner
                most = max(most, count * inner)
                closed = count * inner  # (a{9}){9}{9}
            else:
                open_groups[-1] += count
                closed = count
    return most
