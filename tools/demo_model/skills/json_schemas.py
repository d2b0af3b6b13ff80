"""Properties of JSON objects, and their schemas as people and libraries write them."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tools.demo_model.skills.wording import capitalized

Schema = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """One property of an object."""

    name: str
    value: Any
    schema: Schema


def schema_of(value: Any) -> Schema:
    """Return the plainest schema that the value is an instance of."""
    match value:
        case bool():
            return {"type": "boolean"}
        case None:
            return {"type": "null"}
        case int():
            return {"type": "integer"}
        case float():
            return {"type": "number"}
        case str():
            return {"type": "string"}
        case list():
            items = [schema_of(item) for item in value]
            is_uniform = bool(items) and all(item == items[0] for item in items)
            return {"type": "array", "items": items[0] if is_uniform else {}}
    return object_schema([Field(name, item, schema_of(item)) for name, item in value.items()])


def object_schema(fields: Sequence[Field]) -> Schema:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": {field.name: field.schema for field in fields},
        "required": [field.name for field in fields],
    }


def titled(field: Field) -> Schema:
    """Return the field's schema as pydantic writes it."""
    title = {"title": capitalized(field.name.replace("_", " "))}
    return dict(sorted((field.schema | title).items()))


def schema_text(rng: random.Random, fields: Sequence[Field], title: str) -> str:
    """Return the schema of the fields as some library prints it."""
    schema = object_schema(fields)
    if rng.random() < 0.7:
        schema = {
            "properties": {field.name: titled(field) for field in fields},
            "required": schema["required"],
            "title": title,
            "type": "object",
        }
    elif rng.random() < 0.5:
        schema["additionalProperties"] = False
    return json.dumps(schema, ensure_ascii=False, indent=2 if rng.random() < 0.7 else None)
