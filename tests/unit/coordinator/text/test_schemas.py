"""What of a JSON schema is enforced: never more than it says, less where that is of more use."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.text.grammars.schemas import MAX_INTEGER, narrowed

CLOSED = {"additionalProperties": False}
WHOLE = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
TEXT = {"type": "string"}
LISTED = {"properties": {"a": TEXT}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (LISTED, LISTED | CLOSED),
        (LISTED | {"additionalProperties": TEXT}, LISTED | {"additionalProperties": TEXT}),
        ({"type": "object"}, {"type": "object"}),
        ({"properties": {}}, {"properties": {}} | CLOSED),
        ({"items": LISTED}, {"items": LISTED | CLOSED}),
        ({"anyOf": [LISTED, TEXT]}, {"anyOf": [LISTED | CLOSED, TEXT]}),
        ({"$defs": {"x": LISTED}}, {"$defs": {"x": LISTED | CLOSED}}),
        ({"type": "integer"}, WHOLE),
        ({"type": ["integer", "null"]}, WHOLE | {"type": ["integer", "null"]}),
        ({"properties": {"items": {"type": "integer"}}}, {"properties": {"items": WHOLE}} | CLOSED),
        ({"type": "integer", "minimum": 10**30}, {"type": "integer", "minimum": 10**30}),
        ({"type": "integer", "const": 10**30}, {"type": "integer", "const": 10**30}),
        ({"type": ["integer", "number"]}, {"type": ["integer", "number"]}),
        ({"enum": [LISTED]}, {"enum": [LISTED]}),
    ],
)
def test_what_is_not_spoken_of_is_left_out(schema: Any, expected: Any) -> None:
    assert narrowed(schema) == expected


DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}  # pydantic's
NULL = {"type": "null"}
NAMED = {"type": "string", "pattern": "^(?<year>[0-9]{4})$"}  # a group, no look-behind


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (TEXT | {"format": "password"}, TEXT),
        (TEXT | {"format": "uri"}, TEXT | {"format": "uri"}),
        (TEXT | {"format": "idn-email"}, TEXT | {"format": "idn-email"}),
        ({"properties": {"format": TEXT}}, {"properties": {"format": TEXT}} | CLOSED),
        ({"const": {"format": "x"}}, {"const": {"format": "x"}}),
        ({"anyOf": [{"type": "number"}, DECIMAL]}, {"anyOf": [{"type": "number"}]}),
        ({"anyOf": [DECIMAL]}, {"anyOf": [DECIMAL]}),
        ({"anyOf": [DECIMAL, NULL]}, {"anyOf": [DECIMAL, NULL]}),  # else only null would be left
        ({"anyOf": [NAMED, TEXT]}, {"anyOf": [NAMED, TEXT]}),
        ({"allOf": [{"$ref": "#"}], "title": "x"}, {"$ref": "#", "title": "x"}),
        (
            {"properties": {"a": {"allOf": [TEXT | {"format": "x"}], "default": ""}}},
            {"properties": {"a": TEXT | {"default": ""}}} | CLOSED,
        ),
        ({"allOf": [LISTED, {"format": "x"}]}, {"allOf": [LISTED, {}]}),
        ({"allOf": [LISTED], "properties": {}}, {"allOf": [LISTED], "properties": {}}),
        ({"allOf": 3, "format": 3, "anyOf": [3]}, {"allOf": 3, "format": 3, "anyOf": [3]}),
    ],
)
def test_what_generators_write_out_of_habit_does_no_harm(schema: Any, expected: Any) -> None:
    assert narrowed(schema) == expected


@pytest.mark.parametrize(
    "schema",
    [
        LISTED | {"required": ["b"]},
        LISTED | {"minProperties": 2},
        LISTED | {"anyOf": [{"properties": {"b": TEXT}}]},
        LISTED | {"patternProperties": {"^x": TEXT}},
        {"allOf": [LISTED, {"properties": {"b": TEXT}}]},
        LISTED | {"$ref": "#/$defs/x", "$defs": {"x": {"properties": {"b": TEXT}}}},
        LISTED | {"required": 3},
        {"properties": 3, "anyOf": 3, "type": {}},
    ],
)
def test_what_another_part_may_speak_of_stays(schema: Any) -> None:
    assert narrowed(schema) == schema
