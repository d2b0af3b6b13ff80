"""Values of which a schema says nothing: any JSON, but its numbers end like all others."""

from __future__ import annotations

from typing import Any

from coordinator.text.grammars.keywords import LISTS, types_of
from coordinator.text.grammars.numbers import MAX_DECIMALS, MAX_NUMBER

_NAME = "any"  # no path to a definition of the client's begins so
_REFERENCE = {"$ref": f"#/$defs/{_NAME}"}
_NUMBER = {
    "type": "number",
    "minimum": -MAX_NUMBER,
    "maximum": MAX_NUMBER,
    "multipleOf": float(f"1e-{MAX_DECIMALS}"),
}
_ANY = {
    "anyOf": [
        {"type": ["null", "boolean", "string"]},
        _NUMBER,
        {"type": "array", "items": _REFERENCE},
        {"type": "object", "additionalProperties": _REFERENCE},
    ]
}
_MAPPINGS = ("properties", "patternProperties", "$defs")
# type |-> what says of which kind the values inside are that nothing else speaks of
_REST = {"array": "items", "object": "additionalProperties"}


def filled(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema, none of whose parts are combined, that says what any value may be."""
    made = _filled(schema)
    if made == schema:
        return schema
    definitions: dict[str, Any] = made.get("$defs", {})
    return {**made, "$defs": {**definitions, _NAME: _ANY}}


def _filled(schema: Any) -> Any:
    if schema is True or schema == {}:
        return _REFERENCE
    if not isinstance(schema, dict) or "$ref" in schema:
        return schema if schema is False else _with_definitions(schema)
    made = dict(schema)
    for name in LISTS:
        if isinstance(made.get(name), list):
            made[name] = [_filled(one) for one in made[name]]
    for name in _MAPPINGS:
        if name in made:
            made[name] = {key: _filled(one) for key, one in made[name].items()}
    for kind, name in _REST.items():
        is_list = isinstance(made.get(name), list)
        if name in made and not is_list:
            made[name] = _filled(made[name])
        elif kind in (types_of(schema) or ()) and not made.keys() & {"enum", "const"}:
            made.setdefault("additionalItems" if is_list else name, _REFERENCE)
    return made


def _with_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if "$defs" in made:
        made["$defs"] = {name: _filled(one) for name, one in made["$defs"].items()}
    return made
