"""Narrows JSON schemas before they are enforced, where they allow more than their authors meant.

Every instance of the narrowed schema is also an instance of the client's. A schema that lists
properties without excluding others allows any others, and integers are unbounded. A model that is
constrained token by token makes use of that, and writes values that no program can use.

First, what schema generators write out of habit, and no grammar could express, is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

MAX_INTEGER = 10**18 - 1  # programs can be expected to use 64 bits
# Excludes what the library's own dates also allow: the year 0000, 29 February in any year.
_LEAP = "(0[48]|[2468][048]|[13579][26])"
_CALENDAR = (
    "^((\\d{3}[1-9]|\\d{2}[1-9]\\d|\\d[1-9]\\d{2}|[1-9]\\d{3})"
    "-((0[13-9]|1[0-2])-\\d{2}|02-([01]\\d|2[0-8]))"
    f"|(\\d{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
# The values of "format" that JSON Schema defines. Any other one is a remark that fits every value.
_FORMATS = frozenset(
    (
        *("date-time", "date", "time", "duration", "email", "idn-email", "hostname"),
        *("idn-hostname", "ipv4", "ipv6", "uri", "uri-reference", "uri-template", "iri"),
        *("iri-reference", "uuid", "json-pointer", "relative-json-pointer", "regex"),
    )
)
_REMARKS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated"),
        *("readOnly", "writeOnly", "$comment"),
    )
)
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_VALUES = ("enum", "const")
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties", "if", "not")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "contains", "propertyNames")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_MAPPINGS = ("properties", "patternProperties", "$defs", "definitions")


def narrowed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema without unlisted properties, integers of 19 digits and impossible dates."""
    schema = _simplified(schema)
    if any("allOf" in node or _combines_a_reference(node) for node in _nodes(schema)):
        return schema  # a property that one part does not list may be listed by another
    made = _narrowed(schema, is_combined=False)
    assert isinstance(made, dict)
    return made


def _simplified(schema: Any) -> Any:
    """Leave out formats that mean nothing, an `allOf` of one schema, and what cannot be enforced
    if there is an alternative to it."""
    if not isinstance(schema, dict):
        return schema
    made = _with_inner(schema, lambda _, inner: _simplified(inner))
    if isinstance(made.get("format"), str) and made["format"] not in _FORMATS:
        del made["format"]
    if isinstance(made.get("anyOf"), list):
        enforceable = [one for one in made["anyOf"] if not _looks_around(one)]
        if any(one != {"type": "null"} for one in enforceable):  # else every answer would be null
            made["anyOf"] = enforceable
    parts = made.get("allOf")
    is_alone = made.keys() - _REMARKS == {"allOf"}
    if is_alone and isinstance(parts, list) and len(parts) == 1 and isinstance(parts[0], dict):
        del made["allOf"]
        made |= parts[0]
    return made


def _looks_around(schema: Any) -> bool:
    pattern = schema.get("pattern") if isinstance(schema, dict) else None
    return isinstance(pattern, str) and _LOOK_AROUND.search(pattern) is not None


def _narrowed(schema: Any, *, is_combined: bool) -> Any:
    """Narrow one schema; `is_combined`: another schema applies to the same value."""
    if not isinstance(schema, dict):
        return schema
    combines = is_combined or ("properties" in schema and any(name in schema for name in _COMBINE))
    made = _with_inner(
        schema,
        lambda name, inner: _narrowed(inner, is_combined=combines and name in ("anyOf", "oneOf")),
    )
    if not combines and _lists_enough(made):
        made.setdefault("additionalProperties", False)
    if _is_integer(made) and not is_combined and not any(n in made for n in (*_BOUNDS, *_VALUES)):
        made |= {"minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
    if made.get("format") in ("date", "date-time") and not is_combined:
        made.setdefault("pattern", _CALENDAR)
    return made


def _with_inner(schema: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a copy in which each schema inside is changed, given the keyword that holds it."""
    made = dict(schema)
    for name in _SCHEMAS:
        if name in made:
            made[name] = change(name, made[name])
    for name in _LISTS:
        if isinstance(made.get(name), list):
            made[name] = [change(name, inner) for inner in made[name]]
    for name in _MAPPINGS:
        if isinstance(made.get(name), dict):
            made[name] = {key: change(name, inner) for key, inner in made[name].items()}
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
