"""Tells apart the schemas of `oneOf` by a property that says which one it is, as generators write.

The library tells some apart itself, but follows no references. A value that fits at most one schema
anyway fits one of them if it fits any.
"""

from __future__ import annotations

from typing import Any

from coordinator.text.grammars.keywords import types_of


def are_told_apart(schemas: list[Any]) -> bool:
    """Whether no value fits two of these schemas, since a property that all have differs."""
    tags = [_tags(one) for one in schemas]
    shared = set.intersection(*map(set, tags)) if tags else set()
    for name in shared:
        values = [value for one in tags for value in one[name]]
        if len(set(values)) == len(values):
            return True
    return False


def tag_of(schema: dict[str, Any]) -> str:
    """Return the property that tells which alternative a value is, as OpenAPI says it; "": none.

    Readers of such unions want it in each value, also where it has a default.
    """
    said = schema.get("discriminator")
    name = said.get("propertyName") if isinstance(said, dict) else None
    return name if isinstance(name, str) else ""


def requiring(schema: Any, name: str) -> Any:
    """Return a schema that requires a property, if it lists that; else, or if it does, itself."""
    if not isinstance(schema, dict) or name not in _mapping(schema.get("properties")):
        return schema
    required = schema.get("required", [])
    if not isinstance(required, list) or name in required:
        return schema
    return schema | {"required": [*required, name]}


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _tags(schema: Any) -> dict[str, list[str]]:
    """Return name |-> all texts that a required property of an object may have."""
    if not isinstance(schema, dict) or types_of(schema) != frozenset(("object",)):
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
