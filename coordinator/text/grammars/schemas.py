"""Narrows JSON schemas before they are enforced, where they allow more than their authors meant.

Every instance of the narrowed schema is also an instance of the client's. A schema that lists
properties without excluding others allows any others, and integers are unbounded. A model that is
constrained token by token makes use of that, and writes values that no program can use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_INTEGER = 10**18 - 1  # programs can be expected to use 64 bits
# Excludes what the library's own dates also allow: the year 0000, 29 February in any year.
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_CALENDAR = (
    "^((\\d{3}[1-9]|\\d{2}[1-9]\\d|\\d[1-9]\\d{2}|[1-9]\\d{3})"
    "-((0[13-9]|1[0-2])-\\d{2}|02-([01]\\d|2[0-8]))"
    f"|(\\d{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_VALUES = ("enum", "const")
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "not")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")
_LISTS = ("anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without unlisted properties, integers of 19 digits and impossible dates."""
    if any("allOf" in node or _combines_a_reference(node) for node in _nodes(schema)):
        return schema  # a property that one part does not list may be listed by another
    made = _narrowed(schema, is_combined=False)
    assert isinstance(made, dict)
    return made


def _narrowed(schema: Any, *, is_combined: bool) -> Any:
    """Narrow one schema; `is_combined`: another schema applies to the same value."""
    if not isinstance(schema, dict):
        return schema
    made = dict(schema)
    combines = is_combined or ("properties" in made and any(name in made for name in _COMBINE))
    for name in _SCHEMAS:
        if name in made:
            made[name] = _narrowed(made[name], is_combined=False)
    for name in _LISTS:
        if isinstance(made.get(name), list):
            inner = combines and name != "prefixItems"
            made[name] = [_narrowed(one, is_combined=inner) for one in made[name]]
    for name in _MAPPINGS:
        if isinstance(made.get(name), dict):
            made[name] = {k: _narrowed(one, is_combined=False) for k, one in made[name].items()}
    if not combines and _lists_enough(made):
        made.setdefault("additionalProperties", False)
    if _is_integer(made) and not is_combined and not any(n in made for n in (*_BOUNDS, *_VALUES)):
        made |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    if made.get("format") in ("date", "date-time") and not is_combined:
        made.setdefault("pattern", _CALENDAR)
    return made


def _lists_enough(schema: dict[str, Any]) -> bool:
    """Return whether an object can satisfy the schema with its listed properties alone."""
    listed, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(listed, dict) or not isinstance(required, list):
        return False
    return "minProperties" not in schema and listed.keys() >= set(map(str, required))


def _is_integer(schema: dict[str, Any]) -> bool:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    return "integer" in kinds and "number" not in kinds


def _combines_a_reference(schema: dict[str, Any]) -> bool:
    return "$ref" in schema and "properties" in schema


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over all objects in a schema: its subschemas, but also e.g. constants."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _nodes(value)
