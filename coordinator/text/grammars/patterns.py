"""Regular expressions as JSON Schema means them (ECMA-262), in the library's spelling."""

from __future__ import annotations

import re
from typing import Any

from coordinator.text.grammars.places import SchemaPlace

_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_PARTS = re.compile(r"\\.|\[\^?\]|.", re.DOTALL)
_ESCAPE = r"\\(?:[xu]\{\w*\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|.)"
# What is in a class, or a character outside of classes.
_LITERALS = re.compile(rf"\[((?:{_ESCAPE}|[^\]\\])*+)\]?|({_ESCAPE}|.)", re.DOTALL)
_RANGES = re.compile(rf"({_ESCAPE}|.)(?:-({_ESCAPE}|.))?", re.DOTALL)
_NO_SPELLING = re.compile(
    r"[\x00-\x07\x0b\x0e-\x1f\x7f]|\\[av]|\\[xu]\{?0*(?:[0-7bBeEfF]|1[0-9a-fA-F]|7[fF])\}?"
)
_SPACES = r"\t\n\x0B\x0C\r\x20\xA0\u1680\u2000-\u200A\u2028\u2029\u202F\u205F\u3000\uFEFF"
_OUTSIDE = {
    r"\s": f"[{_SPACES}]",
    r"\S": f"[^{_SPACES}]",
    ".": r"[^\n\r\u2028\u2029]",
    r"\/": "/",
    "[^]": r"(?s:.)",
    "[]": r"[^\s\S]",
}
_IN_CLASS = {
    r"\s": _SPACES,
    r"\S": f"[^{_SPACES}]",
    r"\/": "/",
    "[": r"\[",  # for the library, it begins a class inside of the class
    "&": r"\&",  # for the library, two are an intersection, or a difference
    "~": r"\~",
}


def looks_around(pattern: object) -> bool:
    """Whether it has an assertion, which no grammar can express."""
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def translated(pattern: Any, keyword: str, place: SchemaPlace) -> str:
    """Return a pattern for the library. Raises InvalidRequest."""
    if not isinstance(pattern, str):
        raise place.refusal(keyword, "must be a string")
    if looks_around(pattern):
        raise place.refusal(keyword, "has look-around, which is not supported")
    if _lacks_spelling(pattern):
        raise place.refusal(keyword, "has a control character, which is not supported")
    made, is_in_class = [], False
    for part in _PARTS.findall(pattern):
        if part in (r"\b", r"\B") and not is_in_class:
            raise place.refusal(keyword, f"has the word boundary {part}, which is not supported")
        if is_in_class and part in ("[]", "[^]"):
            made.append(r"\[" + part[1:])
            is_in_class = False
            continue
        made.append((_IN_CLASS if is_in_class else _OUTSIDE).get(part, part))
        is_in_class = part == "[" or (is_in_class and part != "]")
    return "".join(made)


def _lacks_spelling(pattern: str) -> bool:
    """Whether a character that no allowed escape spells is needed: the library would leave it out.

    A class that has others, too, only loses it.
    """
    for inside, outside in _LITERALS.findall(pattern):
        ranges = [("^", "")] if inside.startswith("^") else _RANGES.findall(inside or outside)
        if ranges and all(_is_lost(first, last or first) for first, last in ranges):
            return True
    return False


def _is_lost(first: str, last: str) -> bool:
    """Whether no character from the first to the last one has a spelling."""
    if not (_NO_SPELLING.fullmatch(first) and _NO_SPELLING.fullmatch(last)):
        return False
    return all(_NO_SPELLING.fullmatch(chr(i)) for i in range(_code(first), _code(last) + 1))


def _code(character: str) -> int:
    """Return the number of a character without a spelling."""
    if len(character) == 1:
        return ord(character)
    return {"a": 7, "v": 11}.get(character[1]) or int(character[2:].strip("{}"), 16)
