"""Functions as they are offered: with one of their names, and one of several descriptions."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tools.demo_model.skills.json_schemas import Field, Schema, titled
from tools.demo_model.skills.tools import Slot, Task
from tools.demo_model.skills.wording import invented_word

_CLASS_DESCRIPTIONS: Final = (
    "", "An answer.", "Correct `{f}` with all parameters that are required.",
    "A `{f}` as it was extracted, with all the required parameters of the correct types",
    "What was asked for.", "The {f}.",
)  # fmt: skip


@dataclass(frozen=True)
class Offer:
    """An offered function."""

    name: str
    description: str
    parameters: tuple[Field, ...]
    """Parameters with the values of a call."""
    required: tuple[str, ...]

    def schema(self, rng: random.Random) -> Schema:
        """Return the schema of the parameters, with the keys in a random order."""
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
        """Return one line of JSON, as in the chat template."""
        function: dict[str, Any] = {"name": self.name}
        if self.description:
            function["description"] = self.description
        function["parameters"] = self.schema(rng)
        if rng.random() < 0.1:
            function["strict"] = True
        return json.dumps(function, ensure_ascii=False)

    def call(self, arguments: dict[str, Any]) -> str:
        """Return a call of the function."""
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
    """Draw a name that says nothing about the function's purpose."""
    verb = rng.choice(("get", "find", "make", "do", "load", "check", "run", "show"))
    return f"{verb}_{invented_word(rng)}"


def offer_of(rng: random.Random, task: Task) -> tuple[Offer, dict[str, str]]:
    """Return the function with some name, and slot |-> name of its parameters.

    Many names are invented, so that the model reads the offer instead of memorizing names.
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
    """Return a type that is offered as a function."""
    name = rng.choice(names)
    description = rng.choice(_CLASS_DESCRIPTIONS).format(f=name)
    return Offer(name, description, tuple(fields), tuple(field.name for field in fields))
