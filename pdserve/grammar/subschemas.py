"""Where a JSON schema holds other schemas."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_ONE = frozenset(
    (
        *("items", "additionalProperties", "additionalItems", "contains", "propertyNames", "not"),
        *("if", "then", "else", "unevaluatedItems", "unevaluatedProperties"),
    )
)
_LISTS = frozenset(("allOf", "anyOf", "oneOf", "prefixItems", "items"))
_MAPPINGS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)

Path = tuple[str, ...]


def subschemas(schema: dict[str, Any]) -> Iterator[tuple[Path, Any]]:
    """Yield the path and the value of what stands where a schema is expected."""
    for keyword, value in schema.items():
        if keyword in _MAPPINGS and isinstance(value, dict):
            yield from (((keyword, name), inner) for name, inner in value.items())
        elif keyword in _LISTS and isinstance(value, list):
            yield from (((keyword, str(i)), inner) for i, inner in enumerate(value))
        elif keyword in _ONE:
            yield (keyword,), value


def pointer(path: Path) -> str:
    """Return a path as a JSON pointer."""
    return "#" + "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in path)
