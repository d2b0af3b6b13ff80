"""JSON schemas as they are enforced: narrower than they are written, where nobody meant so much.

Every instance of the narrower schema is one of the client's. A schema that lists properties and
does not speak of others admits any others, and integers have no end; a model that is led by a
grammar token by token takes that up, and writes what no program behind it can use.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

MAX_INTEGER = 10**18 - 1  # programs can be expected to hold 64 bits
# What the library's own dates may be besides: years without a number, 29 February in any year.
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
    """No properties beyond those it lists, no integers of 19 digits, no dates that never were."""
    if any("allOf" in node or _combines_a_reference(node) for node in _nodes(schema)):
        return schema  # what one part of it does not list, another may
    made = _narrowed(schema, is_combined=False)
    assert isinstance(made, dict)
    return made


def _narrowed(schema: Any, *, is_combined: bool) -> Any:
    """`is_combined`: another schema has a say in the same value."""
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
    """Whether the properties that it lists are all that an object needs to have."""
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
    """All schemas within, and whatever else is an object: constants too."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _nodes(value)
