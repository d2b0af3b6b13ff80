"""Functions as they are offered: under one of their names, and described in one way or another."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from pdserve.demo_model.json_schemas import Field, Schema, titled
from pdserve.demo_model.tools import Slot, Task
from pdserve.demo_model.wording import invented_word

_CLASS_DESCRIPTIONS: Final = (
    "", "An answer.", "Correct `{f}` with all parameters that are required.",
    "A `{f}` as it was extracted, with all the required parameters of the correct types",
    "What was asked for.", "The {f}.",
)  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """A function as it is offered."""

    name: str
    description: str
    parameters: tuple[Field, ...]
    """With the values that a call would have."""
    required: tuple[str, ...]

    def schema(self, rng: random.Random) -> Schema:
        """Return its parameters' schema, with the keys in one order or another."""
        schema_of_field = titled if rng.random() < 0.2 else lambda field: field.schema
        properties = {field.name: schema_of_field(field) for field in self.parameters}
        parts: list[tuple[str, Any]] = [("type", "object"), ("properties", properties)]
        parts.append(("required", [*self.required]))
        if rng.random() < 0.3:  # as pydantic sorts them
            parts = [*parts[1:], parts[0]]
        if rng.random() < 0.25:
            parts.append(("additionalProperties", False))
        return dict(parts)

    def text(self, rng: random.Random) -> str:
        """Return one line of JSON, as the chat template has it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.schema(rng)
        if rng.random() < 0.1:
            function["strict"] = True
        return json.dumps(function, ensure_ascii=False)

    def call(self, arguments: dict[str, Any]) -> str:
        """Return a call of it."""
        body = {"name": self.name, "arguments": arguments}
        return f"<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"


def _slot_schema(rng: random.Random, slot: Slot, *, is_described: bool) -> Schema:
    schema: Schema = {"type": slot.json_type}
    if slot.json_type == "integer" and rng.random() < 0.3:
        schema["type"] = "number"
    if slot.choices:
        schema["enum"] = list(slot.choices)
    if slot.description and is_described:
        schema["description"] = slot.description
    return schema


def invented_function(rng: random.Random) -> str:
    """Draw a name that tells nothing of what the function is for."""
    verb = rng.choice(("get", "find", "make", "do", "load", "check", "run", "show"))
    return f"{verb}_{invented_word(rng)}"


def offer_of(rng: random.Random, task: Task) -> tuple[Offer, dict[str, str]]:
    """Return the function under some name, and slot |-> name of its parameters.

    Many names are invented: what can be known by heart would not be read.
    """
    name = rng.choice(task.names) if rng.random() < 0.6 else invented_function(rng)
    is_described = rng.random() < 0.4
    fields, names = [], {}
    for slot in task.slots:
        if slot.is_optional and rng.random() < 0.6:
            continue
        name_of_slot = rng.choice(slot.names) if rng.random() < 0.75 else invented_word(rng)
        names[slot.slot] = name_of_slot
        schema = _slot_schema(rng, slot, is_described=is_described)
        fields.append(Field(name_of_slot, None, schema))
    optional = {slot.slot for slot in task.slots if slot.is_optional and rng.random() < 0.6}
    required = tuple(name for slot, name in names.items() if slot not in optional)
    description = rng.choice(task.descriptions) if rng.random() < 0.85 else ""
    return Offer(name, description, tuple(fields), required), names


def class_offer(rng: random.Random, names: Sequence[str], fields: Sequence[Field]) -> Offer:
    """Return a type that is offered as if it were a function."""
    name = rng.choice(names)
    description = rng.choice(_CLASS_DESCRIPTIONS).format(f=name)
    return Offer(name, description, tuple(fields), tuple(field.name for field in fields))
