"""The keywords of JSON Schema: which say nothing of an instance, which are enforced, which not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

REMARKS = frozenset(
    (
        *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
        *(
            "$comment",
            "$schema",
            "$id",
            "id",
            "$anchor",
            "$dynamicAnchor",
            "$recursiveAnchor",
            "$vocabulary",
        ),
        *("$defs", "definitions", "contentEncoding", "contentMediaType", "contentSchema"),
    )
)
LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")  # hold lists of schemas
TYPES = frozenset(("null", "boolean", "integer", "number", "string", "array", "object"))
COUNTS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
# keyword |-> the type of the values that it is about
ABOUT = {
    **dict.fromkeys(("minItems", "maxItems", "items", "prefixItems", "additionalItems"), "array"),
    **dict.fromkeys(("uniqueItems", "contains", "minContains", "maxContains"), "array"),
    "unevaluatedItems": "array",
    **dict.fromkeys(("minLength", "maxLength", "pattern"), "string"),
    **dict.fromkeys(("minProperties", "maxProperties", "required", "properties"), "object"),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames"), "object"),
    **dict.fromkeys(("dependentRequired", "dependentSchemas", "dependencies"), "object"),
    "unevaluatedProperties": "object",
}
ENFORCED = frozenset(
    (
        *("type", "enum", "const", "allOf", "anyOf", "oneOf", "$ref", "format", "multipleOf"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "pattern"),
        *("items", "prefixItems", "additionalItems", "required", "properties"),
        *("patternProperties", "additionalProperties", *COUNTS),
    )
)

UNEVALUATED = {"unevaluatedItems": "items", "unevaluatedProperties": "additionalProperties"}
_IN_PLACE = frozenset(
    (
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "$ref"),
        *("$dynamicRef", "$recursiveRef", "contains"),
    )
)


def is_any(schema: Any) -> bool:
    """Whether a schema fits every value."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= REMARKS)


def _fit_all(schemas: Any) -> bool:
    return isinstance(schemas, dict) and all(one == [] or is_any(one) for one in schemas.values())


def _is_condition_idle(schema: dict[str, Any]) -> bool:
    return "if" not in schema or all(is_any(schema.get(name, True)) for name in ("then", "else"))


def _is_lone(schema: dict[str, Any], keyword: str) -> bool:
    """Whether no other schema may have looked at what this one has not."""
    return is_any(schema[keyword]) or not schema.keys() & _IN_PLACE


# keyword that cannot be enforced |-> whether it says nothing, given the schema that has it
IDLE: dict[str, Callable[[dict[str, Any]], bool]] = {
    "uniqueItems": lambda s: s["uniqueItems"] is False or s.get("maxItems", 2) in (0, 1),
    "contains": lambda s: s.get("minContains") == 0 and "maxContains" not in s,
    "minContains": lambda s: "contains" not in s or s["minContains"] == 0,
    "maxContains": lambda s: "contains" not in s,
    "propertyNames": lambda s: (
        is_any(s["propertyNames"]) or s["propertyNames"] == {"type": "string"}
    ),
    "unevaluatedItems": lambda s: _is_lone(s, "unevaluatedItems"),
    "unevaluatedProperties": lambda s: _is_lone(s, "unevaluatedProperties"),
    "not": lambda s: s["not"] is False,
    "if": _is_condition_idle,
    "then": _is_condition_idle,
    "else": _is_condition_idle,
    "dependentRequired": lambda s: _fit_all(s["dependentRequired"]),
    "dependentSchemas": lambda s: _fit_all(s["dependentSchemas"]),
    "dependencies": lambda s: _fit_all(s["dependencies"]),
    "$dynamicRef": lambda s: False,
    "$recursiveRef": lambda s: False,
}


def types_of(schema: dict[str, Any]) -> frozenset[str] | None:
    """Return the types that a schema names; None: it names none.

    `nullable` adds null to them, as in OpenAPI 3.0.3: not to `enum`, and not without `type`.
    """
    kind = schema.get("type")
    if kind is None:
        return None
    named = frozenset([kind] if isinstance(kind, str) else kind)
    return named | {"null"} if schema.get("nullable") is True else named


def unsupported(schema: dict[str, Any]) -> list[str]:
    """Return the keywords of a schema that say something and cannot be enforced."""
    types = types_of(schema)
    return sorted(
        keyword
        for keyword, is_idle in IDLE.items()
        if keyword in schema and not is_idle(schema) and is_about(keyword, types)
    )


def is_about(keyword: str, types: frozenset[str] | None) -> bool:
    """Whether values of these types can violate a keyword."""
    return types is None or keyword not in ABOUT or ABOUT[keyword] in types


def is_of(value: Any, types: frozenset[str] | None) -> bool:
    """Whether a value is of one of these types."""
    if types is None:
        return True
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int() | float():
            return "number" in types or ("integer" in types and value == value // 1)
        case str():
            return "string" in types
    return ("array" if isinstance(value, list) else "object") in types
