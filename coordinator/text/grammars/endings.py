"""Finds schemas whose values would never end, since each of them needs another one inside.

A model that is kept to such a schema would write until its limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coordinator.text.grammars.keywords import types_of

_NOTHING: frozenset[str] = frozenset()


def endless(schemas: Mapping[str, Any]) -> str | None:
    """Return a reference to a schema without an end, if there is one.

    `schemas`: reference |-> the schema that it means, as `schemas` makes them.
    """
    ended: set[str] = set()
    waiting: dict[str, list[str]] = {}  # for a reference |-> those whose schemas need it
    left = list(schemas)
    while left:
        one = left.pop()
        if one in ended:
            continue
        needed = _needed(schemas[one], ended)
        if not needed:
            ended.add(one)
            left += waiting.pop(one, ())
        for other in needed:
            waiting.setdefault(other, []).append(one)
    return next((one for one in schemas if one not in ended), None)


def _needed(schema: Any, ended: set[str]) -> frozenset[str]:
    """Return references of which one must have an end before the schema has; none: it has one."""
    if not isinstance(schema, dict) or schema.keys() & {"enum", "const"}:
        return _NOTHING
    if "$ref" in schema and schema["$ref"] not in ended:
        return frozenset([schema["$ref"]])
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and (found := _of_any(schema[keyword], ended)):
            return found
    kinds = types_of(schema)
    if kinds is None or kinds - {"array", "object"}:
        inside: list[Any] = []  # a value that holds no others fits
    elif len(kinds) == 2:
        return _of_any([schema | {"type": kind} for kind in sorted(kinds)], ended)
    else:
        inside = _required_items(schema) if "array" in kinds else _required_properties(schema)
    for one in (*schema.get("allOf", ()), *inside):
        if found := _needed(one, ended):
            return found
    return _NOTHING


def _of_any(schemas: list[Any], ended: set[str]) -> frozenset[str]:
    """Of schemas of which one is enough."""
    needed = [_needed(one, ended) for one in schemas]
    return frozenset().union(*needed) if all(needed) else _NOTHING


def _required_items(schema: dict[str, Any]) -> list[Any]:
    least, items = schema.get("minItems", 0), schema.get("items", True)
    listed = items if isinstance(items, list) else schema.get("prefixItems", [])
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    return [*listed[:least], *[rest] * (least > len(listed))]


def _required_properties(schema: dict[str, Any]) -> list[Any]:
    listed, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    rest = True if "patternProperties" in schema else rest
    return [listed.get(name, rest) for name in schema.get("required", ())]
