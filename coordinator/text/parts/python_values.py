"""Values as Python literals, or as JSON where models mix the two: `true`, `null`."""

from __future__ import annotations

import ast
import re
from typing import Any

_NAMES = {"true": True, "false": False, "null": None}
_ESCAPED_BY_PYTHON = "\\'\"abfnrtv01234567\n"
_MEANT = {"\n": "\\n", "\r": "\\r", "\0": "\\x00", "\\/": "/"}  # the last is of JSON
# Each is tried once: words from their beginning, and what does not end as a string up to the end.
_STRING = re.compile(r"""(?<!\w)(\w*+)(\"{3}|'{3}|"|')((?:\\.|(?!\2)[^\\])*+)(\2)?""", re.DOTALL)
_HEX = "[0-9a-fA-F]"
_ESCAPE = re.compile(rf"\\(?:x{_HEX}{{2}}|u{_HEX}{{4}}|U000{_HEX}{{5}}|.)|[\n\r\0]", re.DOTALL)


def python_value(source: str) -> Any:
    """Return the value of a literal. Raises ValueError if it is none, or none that JSON has."""
    try:
        tree = ast.parse(_with_escapes(source.strip()), mode="eval").body
        return _value(tree)
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError("no literal") from error


def without_strings(source: str) -> str:
    """Return what a literal has besides its strings."""
    return _STRING.sub("", source)


def _value(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_value(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
            return value
    raise ValueError("no literal")


def _key(node: ast.expr | None) -> str:
    key = None if node is None else _value(node)
    if not isinstance(key, str):
        raise ValueError("a key that is no string")
    return key


def _with_escapes(source: str) -> str:
    """Escape what may not stand in a string: line breaks, and backslashes that escape nothing."""
    return _STRING.sub(_with_escapes_inside, source)


def _with_escapes_inside(literal: re.Match[str]) -> str:
    prefix, quote, text, end = literal.groups()
    if prefix or not end:  # raw strings have no escapes; the others are no JSON
        return literal[0]
    return quote + _ESCAPE.sub(_escaped, text) + quote


def _escaped(found: re.Match[str]) -> str:
    text = found[0]
    if text in _MEANT:
        return _MEANT[text]
    return text if len(text) > 2 or text[1] in _ESCAPED_BY_PYTHON else "\\" + text
