"""Closes objects: a schema that lists properties without excluding others allows any others.

Every instance of the closed schema is also one of the open one. A model that is constrained token
by token makes use of what is open, and writes properties that no program reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

_COMBINE = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_MAPPINGS = ("properties", "patternProperties", "$defs")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, as `schemas` makes them, whose objects have no unlisted properties."""
    if any(_joins(node) for node in _nodes(schema)):
        return schema  # a property that one part does not list may be listed by another
    made = _closed(schema, is_combined=False)
    assert isinstance(made, dict)
    return made


def _closed(schema: Any, *, is_combined: bool) -> Any:
    """Close one schema; `is_combined`: another schema applies to the same value."""
    if not isinstance(schema, dict):
        return schema
    combines = is_combined or ("properties" in schema and any(name in schema for name in _COMBINE))
    made = _with_inner(
        schema,
        lambda name, inner: _closed(inner, is_combined=combines and name in ("anyOf", "oneOf")),
    )
    if not combines and _lists_enough(made):
        made.setdefault("additionalProperties", False)
    return made


def _with_inner(schema: dict[str, Any], change: Callable[[str, Any], Any]) -> dict[str, Any]:
    """Return a copy in which each schema inside is changed, given the keyword that holds it."""
    made = dict(schema)
    for name in _SCHEMAS:
        if isinstance(made.get(name), dict):
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


def _joins(schema: dict[str, Any]) -> bool:
    """Whether a schema joins others that cannot be told to be closed or open by themselves."""
    is_text = all(
        part.keys() == {"pattern"} for part in schema.get("allOf", ()) if isinstance(part, dict)
    )
    refers = "$ref" in schema or any("$ref" in part for part in _alternatives(schema))
    return not is_text or ("properties" in schema and refers)


def _alternatives(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Iterate over the alternatives of a schema, of which one applies beside the rest of it."""
    for keyword in ("anyOf", "oneOf"):
        parts = schema.get(keyword)
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict):
                yield part
                yield from _alternatives(part)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over all objects in a schema: its subschemas, but also e.g. constants."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _nodes(value)
