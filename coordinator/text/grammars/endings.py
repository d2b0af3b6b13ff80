"""Finds schemas whose values would never end, since each of them needs another one inside.

A model that is kept to such a schema would write until its limit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from coordinator.text.grammars.keywords import types_of


def endless(schemas: Mapping[str, Any]) -> str | None:
    """Return a reference to a schema without an end, if there is one.

    Each schema is read once, however they need each other: it takes time in proportion to them.

    `schemas`: reference |-> the schema that it means, as `schemas` makes them.
    """
    gates = _Gates()
    for reference, schema in schemas.items():
        gates.read(schema, gates.of(reference))
    return next((one for one in schemas if not gates.is_open(gates.of(one))), None)


class _Gates:
    """What must have an end before what: a gate opens once so many that lead to it have opened."""

    def __init__(self) -> None:
        self._left: list[int] = []  # gate |-> how many must still open
        self._leads_to: list[list[int]] = []
        self._of: dict[str, int] = {}  # reference |-> of what it means

    def of(self, reference: str) -> int:
        """Return the gate of a reference, which opens once what it means has an end."""
        if reference not in self._of:
            self._of[reference] = self._add()
        return self._of[reference]

    def is_open(self, gate: int) -> bool:
        """Return whether it has opened."""
        return self._left[gate] <= 0

    def read(self, schema: Any, outer: int) -> None:
        """Have a gate opened, or be one nearer to it, once a value of the schema can end."""
        if not isinstance(schema, dict) or schema.keys() & {"enum", "const"}:
            self._open(outer)
            return
        every = self._add(outer)
        if "$ref" in schema:
            self._wait(self.of(schema["$ref"]), every)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                self._read_any(schema[keyword], every)
        self._read_all(schema.get("allOf", ()), every)
        kinds = types_of(schema)
        if kinds is not None and not kinds - {"array", "object"}:  # only values that hold others
            one = self._add(self._one_more(every))
            for kind in kinds:
                both = self._add(one)
                has = _required_items if kind == "array" else _required_properties
                self._read_all(has(schema), both)
                self._open(both)
        self._open(every)

    def _read_all(self, schemas: Iterable[Any], outer: int) -> None:
        for schema in schemas:
            self.read(schema, self._one_more(outer))

    def _read_any(self, schemas: list[Any], outer: int) -> None:
        one = self._add(self._one_more(outer))
        for schema in schemas:
            self.read(schema, one)
        if not schemas:
            self._open(one)

    def _add(self, *leads_to: int) -> int:
        self._left.append(1)
        self._leads_to.append([*leads_to])
        return len(self._left) - 1

    def _one_more(self, gate: int) -> int:
        self._left[gate] += 1
        return gate

    def _wait(self, other: int, gate: int) -> None:
        if not self.is_open(other):
            self._leads_to[other].append(self._one_more(gate))

    def _open(self, gate: int) -> None:
        """Count one that has opened, and open what that leads to."""
        opened = [gate]
        while opened:
            one = opened.pop()
            self._left[one] -= 1
            if self._left[one] == 0:
                opened += self._leads_to[one]


def _required_items(schema: dict[str, Any]) -> list[Any]:
    least, items = schema.get("minItems", 0), schema.get("items", True)
    listed = items if isinstance(items, list) else schema.get("prefixItems", [])
    rest = schema.get("additionalItems", True) if isinstance(items, list) else items
    return [*listed[:least], *[rest] * (least > len(listed))]


def _required_properties(schema: dict[str, Any]) -> list[Any]:
    listed, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    rest = True if "patternProperties" in schema else rest
    return [listed.get(name, rest) for name in schema.get("required", ())]
