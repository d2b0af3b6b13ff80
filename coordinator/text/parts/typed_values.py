"""Values of arguments that a model wrote as plain text: what they are, the function's schema says.

The text itself does not tell a number from a string of digits.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from coordinator.text.parts.python_values import python_value

Schema = Mapping[str, Any]

_INTEGER = re.compile(r"[+-]?\d{1,4000}(\.0+)?")
_WORDS = {"null": ("null", "none"), "boolean": ("true", "false")}


def argument_schema(schema: Schema, name: str) -> Schema:
    """Return the schema of one argument; empty if nothing is said of it."""
    for part in _alternatives(schema, schema):
        listed = part.get("properties")
        if isinstance(listed, Mapping) and isinstance(listed.get(name), Mapping):
            found: Schema = listed[name]
            return found
    other = schema.get("additionalProperties")
    return other if isinstance(other, Mapping) else {}


def is_text(schema: Schema, root: Schema) -> bool:
    """Return whether the value is a string for certain, whatever it looks like."""
    return kinds_of(schema, root) == {"string"} and not choices_of(schema, root)


def kinds_of(schema: Schema, root: Schema) -> set[str]:
    """Return the JSON types that the schema names; none: it does not say."""
    kinds: set[str] = set()
    for part in _alternatives(schema, root):
        kind = part.get("type")
        kinds |= {k for k in (kind if isinstance(kind, list) else [kind]) if isinstance(k, str)}
    return kinds


def as_json(text: str, schema: Schema, root: Schema) -> str:
    """Return a value that was written as text, as JSON: of the schema's types if it can be."""
    choices, kinds = choices_of(schema, root), kinds_of(schema, root)
    for choice in choices:
        told = choice if isinstance(choice, str) else json.dumps(choice)
        if told == text or (not isinstance(choice, str) and told.lower() == text.strip().lower()):
            return json.dumps(choice)
    bare = text.strip()
    for kind in ("null", "boolean", "integer", "number", "object", "array"):
        if kind in kinds and (found := _of_kind(bare, kind)) is not None:
            return found
    if not kinds and not choices and bare[:1] in ("{", "["):
        return _structure(bare, dict) or _structure(bare, list) or json_of(text)
    return json_of(text)


def json_of(value: Any) -> str:
    """Return a value as JSON that can be sent. Raises ValueError if there is none."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    # Half of a surrogate pair can be escaped, but not encoded.
    return text if text.isascii() or _is_encodable(text) else json.dumps(value, allow_nan=False)


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _of_kind(text: str, kind: str) -> str | None:
    """Return a text as JSON of one type; None: it is not of this type."""
    match kind:
        case "null" | "boolean":
            words = _WORDS[kind]
            return None if text.lower() not in words else text.lower().replace("none", "null")
        case "integer":
            return str(int(text.partition(".")[0])) if _INTEGER.fullmatch(text) else None
        case "number":
            return _number(text)
    return _structure(text, dict if kind == "object" else list)


def _number(text: str) -> str | None:
    try:
        value = json.loads(text)
        return text if type(value) in (int, float) and math.isfinite(value) else None
    except (ValueError, RecursionError):
        pass
    try:
        return json_of(float(text))
    except ValueError:
        return None


def _structure(text: str, kind: type) -> str | None:
    """Return an object or a list, which may be written as JSON or as Python."""
    for is_python in (False, True):
        try:
            value = python_value(text) if is_python else json.loads(text, strict=False)
            if isinstance(value, kind):
                return json_of(value)
        except (ValueError, RecursionError):
            continue
    return None


def constraints_of(schema: Schema, root: Schema) -> dict[str, list[Any]]:
    """Return keyword |-> its values, in the schema and what it refers to or is combined of."""
    found: dict[str, list[Any]] = {}
    for part in _alternatives(schema, root):
        for keyword, value in part.items():
            found.setdefault(keyword, []).append(value)
    return found


def choices_of(schema: Schema, root: Schema) -> list[Any]:
    """Return the values that the schema lists; none: it lists none."""
    found: list[Any] = []
    for part in _alternatives(schema, root):
        if isinstance(part.get("enum"), list):
            found += part["enum"]
        if "const" in part:
            found.append(part["const"])
    return found


def _alternatives(schema: Schema, root: Schema) -> Iterator[Schema]:
    """Iterate over a schema and what it refers to or is combined of, each once."""
    seen: set[int] = set()
    left: list[Any] = [schema]
    while left:
        one = left.pop(0)
        if not isinstance(one, Mapping) or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        for keyword in ("anyOf", "oneOf", "allOf"):
            if isinstance(one.get(keyword), list):
                left += one[keyword]
        left.append(_referred(one.get("$ref"), root))


def _referred(reference: Any, root: Schema) -> Any:
    """Return what a reference within the document points to; None: nothing."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    found: Any = root
    for word in reference.removeprefix("#").split("/")[1:]:
        word = word.replace("~1", "/").replace("~0", "~")
        found = found.get(word) if isinstance(found, Mapping) else None
    return found
