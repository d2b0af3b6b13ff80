"""Tells apart the schemas of `oneOf` by a property that says which one it is, as generators write.

The library tells some apart itself, but follows no references. A value that fits at most one schema
anyway fits one of them if it fits any.
"""

from __future__ import annotations

from typing import Any


def are_told_apart(schemas: list[Any]) -> bool:
    """Whether no value fits two of these schemas, since a property that all have differs."""
    tags = [_tags(one) for one in schemas]
    shared = set.intersection(*map(set, tags)) if tags else set()
    for name in shared:
        values = [value for one in tags for value in one[name]]
        if len(set(values)) == len(values):
            return True
    return False


def _tags(schema: Any) -> dict[str, list[str]]:
    """Return name |-> all texts that a required property of an object may have."""
    if not isinstance(schema, dict) or schema.get("type") != "object":
        return {}
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {name: _texts(properties[name]) for name in required if name in properties}
    return {name: texts for name, texts in found.items() if texts}


def _texts(schema: Any) -> list[str]:
    """Return the only texts that fit; none: it is not known, or others fit, too."""
    if not isinstance(schema, dict):
        return []
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if not isinstance(values, list) or not all(isinstance(one, str) for one in values):
        return []
    return list(dict.fromkeys(values))
