"""What of a JSON schema is enforced: never more than it says, less where that is of more use."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

import jsonschema
import pytest

from coordinator.text.grammars.endings import endless
from coordinator.text.grammars.numbers import MAX_INTEGER
from coordinator.text.grammars.schemas import enforceable
from pdserve.shared.errors import GrammarFailed, InvalidRequest
from tests.unit.coordinator.text.enforced import Enforced

CLOSED = {"additionalProperties": False}
WHOLE = {"type": "integer", "minimum": -MAX_INTEGER, "maximum": MAX_INTEGER}
TEXT = {"type": "string"}
LISTED = {"properties": {"a": TEXT}}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (LISTED, LISTED | CLOSED),
        (LISTED | {"additionalProperties": TEXT}, LISTED | {"additionalProperties": TEXT}),
        (LISTED | {"unevaluatedProperties": False}, LISTED | CLOSED),
        ({"properties": {}}, {"properties": {}} | CLOSED),
        ({"items": LISTED}, {"items": LISTED | CLOSED}),
        ({"anyOf": [LISTED, TEXT]}, {"anyOf": [LISTED | CLOSED, TEXT]}),
        ({"type": "integer"}, WHOLE),
        ({"type": ["integer", "null"]}, WHOLE | {"type": ["integer", "null"]}),
        ({"properties": {"items": {"type": "integer"}}}, {"properties": {"items": WHOLE}} | CLOSED),
        ({"enum": [LISTED]}, {"enum": [LISTED]}),
    ],
)
def test_what_is_not_spoken_of_is_left_out(schema: Any, expected: Any) -> None:
    assert enforceable(schema, "p") == expected


def test_what_is_open_stays_open() -> None:
    for schema in (LISTED | {"additionalProperties": True}, {"type": "object"}, {}, {"items": {}}):
        assert Enforced(schema).takes('{"a": "b", "c": [1.5, {"d": null}, true, "e"]}')


DECIMAL = {"type": "string", "pattern": r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"}  # pydantic's
NULL = {"type": "null"}
NAMED = {"type": "string", "pattern": "^(?<year>[0-9]{4})$"}  # a group, no look-behind
TRUTH = {"type": "boolean"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (TEXT | {"format": "password"}, TEXT),
        (TEXT | {"format": "uuid"}, TEXT | {"format": "uuid"}),
        ({"properties": {"format": TEXT}}, {"properties": {"format": TEXT}} | CLOSED),
        ({"const": {"format": "x"}}, {"const": {"format": "x"}}),
        ({"anyOf": [TRUTH, DECIMAL]}, {"anyOf": [TRUTH]}),
        ({"anyOf": [NAMED, TEXT]}, {"anyOf": [NAMED, TEXT]}),
        ({"allOf": [TRUTH], "title": "x"}, TRUTH),
        ({"allOf": [LISTED, {"format": "x"}]}, LISTED | CLOSED),
        ({"allOf": [LISTED], "properties": {}}, {"allOf": [LISTED], "properties": {}}),
    ],
)
def test_what_generators_write_out_of_habit_does_no_harm(schema: Any, expected: Any) -> None:
    assert enforceable(schema, "p") == expected


@pytest.mark.parametrize(
    "schema",
    [
        LISTED | {"required": ["b"]},
        LISTED | {"anyOf": [{"properties": {"b": TEXT}}]},
        LISTED | {"patternProperties": {"^x": TEXT}},
        {"allOf": [LISTED, {"properties": {"b": TEXT}}]},
    ],
)
def test_what_another_part_may_speak_of_stays(schema: Any) -> None:
    assert enforceable(schema, "p") == schema


def test_where_a_reference_points_does_not_matter() -> None:
    other = {"properties": {"b": TEXT}}
    for reference, schema in (
        ("#/$defs/x", {"$defs": {"x": other}}),
        ("#/definitions/a~1b%20ü~0", {"definitions": {"a/b ü~": other}}),
        ("#x", {"$defs": {"?": other | {"$anchor": "x"}}}),
        ("#/anywhere/1", {"anywhere": [0, other]}),
        ("http://a/b#/$defs/x", {"$id": "http://a/b", "$defs": {"x": other}}),
    ):
        alone = Enforced(schema | {"$ref": reference})
        assert alone.takes('{"b": "c"}')
        assert not alone.takes('{"a": "c"}')
        joined = Enforced(schema | LISTED | {"$ref": reference})
        assert joined.takes('{"a": "c", "b": "c"}'), "neither part is closed"
    tree = {"type": "object", "properties": {"next": {"$ref": "#"}}}
    assert Enforced(tree).takes('{"next": {"next": {}}}')
    assert not Enforced(tree).takes('{"next": 1}')


# ---- keywords that say nothing -------------------------------------------------------------------

ANY = {"description": "whatever"}
IDLE: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", keyword: value}, [1, 1])
    for keyword, value in {
        "uniqueItems": False,
        "minItems": 0,
        "items": True,
        "additionalItems": True,
        "prefixItems": [],
        "unevaluatedItems": True,
        "minContains": 2,
        "maxContains": 0,
    }.items()
]
IDLE += [
    ({"type": "object", keyword: value}, {"a": 1})
    for keyword, value in {
        "minProperties": 0,
        "additionalProperties": True,
        "patternProperties": {},
        "propertyNames": True,
        "unevaluatedProperties": ANY,
        "required": [],
        "dependentRequired": {"a": []},
        "dependentSchemas": {"a": ANY},
        "dependencies": {"a": [], "b": True},
    }.items()
]
IDLE += [({"type": "object", "propertyNames": TEXT}, {"a": 1})]
IDLE += [({"type": "array", "contains": TEXT, "minContains": 0}, [1])]
IDLE += [({"type": "array", "uniqueItems": True, "maxItems": 1}, [1])]
IDLE += [
    (TEXT | {keyword: value}, "a")
    for keyword, value in {
        "minLength": 0,
        "maxLength": 1.0,
        "pattern": "",
        "format": "made-up",
        "contentEncoding": "base64",
        "contentMediaType": "text/x",
        "contentSchema": {"not": {}},
        "readOnly": True,
        "writeOnly": True,
        "deprecated": True,
        "examples": [1],
        "default": 5,
        "title": "t",
        "$comment": "c",
        "$id": "http://a/b",
        "$anchor": "a",
        "$dynamicAnchor": "a",
        "$schema": "http://own/schema",
        "$vocabulary": {},
        "nullable": True,
        "x-own": {"not": {}},
        "x-guidance": {"lenient": True},
        "discriminator": {"propertyName": "a"},
        "not": False,
        "if": {"minLength": 9},
        "then": {"minLength": 9},
        "else": False,
        "allOf": [True, ANY],
        "anyOf": [ANY, {"minLength": 9}],
        "uniqueItems": True,
        "contains": {"not": {}},
        "unevaluatedProperties": False,
        "minimum": 10**400,
        "multipleOf": 0.07,
        "enum": None,
        "exclusiveMinimum": True,
    }.items()
]
IDLE += [({"type": "integer", "minimum": 1, "exclusiveMinimum": False}, 1)]
IDLE += [({"if": TEXT, "then": True, "else": ANY, "type": "null"}, None)]


def test_keywords_whose_value_constrains_nothing_are_taken() -> None:
    for schema, instance in IDLE:
        for where in (schema, {"properties": {"p": schema}}, {"items": schema}):
            value = (
                instance
                if where is schema
                else {"p": instance}
                if "properties" in where
                else [instance]
            )
            assert Enforced(where).takes_value(value), where


# ---- refusals ------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"uniqueItems": True}, "uniqueItems"),
    ({"contains": TEXT}, "contains"),
    ({"not": {}}, "not"),
    ({"if": TEXT, "then": False}, "if"),
    ({"propertyNames": {"maxLength": 3}}, "propertyNames"),
    ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({"dependentSchemas": {"a": {"required": ["b"]}}}, "dependentSchemas"),
    ({"unevaluatedProperties": False, "anyOf": [LISTED, TEXT]}, "unevaluatedProperties"),
    ({"$dynamicRef": "#a"}, "$dynamicRef"),
    ({"$ref": "http://elsewhere/schema"}, "$ref"),
    ({"$ref": "#/$defs/nowhere"}, "$ref"),
    ({"$ref": 3}, "$ref"),
    ({"type": "thing"}, "type"),
    ({"type": []}, "type"),
    ({"enum": []}, "enum"),
    ({"const": "a\x00b"}, "const"),
    ({"format": "idn-email"}, "format"),
    ({"pattern": "(?!a)"}, "pattern"),
    ({"pattern": r"^a\b"}, "pattern"),
    ({"pattern": 3}, "pattern"),
    ({"pattern": r"^a\x0bb$"}, "pattern"),  # the library would take "ab"
    ({"pattern": r"^a[\u0001]?b$"}, "pattern"),
    ({"pattern": r"^a[\x01\v-\u{b}\x0e-\x1f]b$"}, "pattern"),
    ({"patternProperties": {r"^a\v$": {}}}, "patternProperties"),
    ({"patternProperties": {"(?<=a)b": {}}}, "patternProperties"),
    ({"minLength": -1}, "minLength"),
    ({"maxItems": 1.5}, "maxItems"),
    ({"minItems": 3, "maxItems": 2}, "minItems"),
    ({"minimum": "1"}, "minimum"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"multipleOf": 0.07}, "multipleOf"),
    ({"required": "a"}, "required"),
    ({"anyOf": []}, "anyOf"),
    ({"properties": []}, "properties"),
    ({"minProperties": 2, "additionalProperties": NULL}, "minProperties"),
    (LISTED | {"maxProperties": 1}, "maxProperties"),
]


@pytest.mark.parametrize(("schema", "keyword"), REFUSED)
def test_what_cannot_be_enforced_is_named_with_its_path(schema: Any, keyword: str) -> None:
    outer = {"$defs": {"d": {"anyOf": [NULL, schema]}}, "properties": {"p": {"$ref": "#/$defs/d"}}}
    for whole, path in (
        (schema, "'#'"),
        ({"items": schema}, "#/items"),
        (outer, "#/$defs/d/anyOf/1"),
    ):
        with pytest.raises(InvalidRequest) as caught:
            Enforced(whole, "tools[3].function.parameters")
        assert caught.value.param == "tools[3].function.parameters"
        assert f"'{keyword}'" in caught.value.message
        assert path in caught.value.message


def test_references_that_lead_to_nothing_but_themselves_are_named() -> None:
    circle = {"a": {"$ref": "#/$defs/b"}, "b": {"allOf": [{"$ref": "#/$defs/a"}]}}
    for schema in (
        {"$ref": "#"},
        {"$defs": circle, "items": {"$ref": "#/$defs/b"}},
        {"$defs": {"a": {"$ref": "#/$defs/a"}}, "anyOf": [NULL, {"$ref": "#/$defs/a"}]},
    ):
        with pytest.raises(InvalidRequest, match=r"'\$ref' in '#.*' leads only back to itself"):
            enforceable(schema, "p")
    tree = {"a": {"$ref": "#/$defs/b"}, "b": {"type": "array", "items": {"$ref": "#"}}}
    assert Enforced({"$ref": "#/$defs/a", "$defs": tree}).takes("[[], []]")


def test_ends_are_looked_for_once_in_each_schema() -> None:
    """However alternatives are nested: three times at each level, this would never end."""
    deep: dict[str, Any] = {"$ref": "needed"}
    for _ in range(60):
        deep = {"type": ["array", "object"], "anyOf": [deep]}
    assert endless({"deep": deep, "needed": {"type": "string"}}) is None
    assert endless({"deep": deep, "needed": {"$ref": "deep"}}) == "deep"


def test_what_has_no_value_that_ends_is_named() -> None:
    a, b = {"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}
    needs: dict[str, Any] = {"type": "object", "properties": {"x": b}, "required": ["x"]}
    for schema in (
        {"type": "object", "properties": {"x": {"$ref": "#"}}, "required": ["x"]},
        {"$defs": {"b": {"type": "array", "items": b, "minItems": 1}}, "anyOf": [NULL, b]},
        {"$defs": {"a": {"anyOf": [b, needs]}, "b": {"allOf": [TRUTH, a]}}, "items": a},
        {"$defs": {"b": needs | {"type": ["array", "object"], "items": b, "minItems": 1}}, **b},
        {"$defs": {"b": {"type": "array", "prefixItems": [NULL, b], "minItems": 2}}, **b},
    ):
        with pytest.raises(InvalidRequest, match=r"'\$ref' in '#.*' leads back to it"):
            enforceable(schema, "p")
    for schema, value in (
        ({"$defs": {"b": needs | {"type": ["object", "null"]}}, **b}, {"x": {"x": None}}),
        ({"$defs": {"b": {"type": "array", "items": b}}, **b}, [[], [[]]]),
        ({"$defs": {"b": needs | {"type": ["array", "object"]}}, **b}, {"x": []}),
        ({"$defs": {"a": {"anyOf": [needs, NULL]}, "b": a}, **a}, {"x": {"x": None}}),
    ):
        assert Enforced(schema).takes_value(value), schema


def test_no_key_comes_twice_or_in_another_spelling() -> None:
    for schema in (
        LISTED | {"additionalProperties": True},
        {"properties": {"a": TEXT, "é": TEXT}, "patternProperties": {"^[b-z]": TEXT}},
        {"required": ["a"], "type": "object"},
        {"allOf": [LISTED, {"required": ["a"], "maxProperties": 3}]},
    ):
        made = Enforced(schema)
        assert made.takes('{"a": "1"}')
        for text in ('{"a": "1", "a": "2"}', '{"\\u0061": 1}', '{"a": "1", "\\u0061": "1"}'):
            assert not made.takes(text), (schema, text)
    counted = Enforced({"required": ["a"], "minProperties": 2, "additionalProperties": NULL})
    assert counted.takes('{"a": null, "b": null}')
    assert not counted.takes('{"a": null}')
    assert not counted.takes('{"a": null, "a": null}')


def test_alternatives_are_told_apart_by_a_property_that_differs() -> None:
    """As pydantic writes discriminated unions: by reference, of trees, too."""
    pet = {"oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}]}
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}, "friend": pet}}
    dog = {"type": "object", "properties": {"kind": {"enum": ["dog", "wolf"]}, "age": WHOLE}}
    needs = {"required": ["kind"]}
    made = Enforced(pet | {"$defs": {"cat": cat | needs, "dog": dog | needs}})
    assert made.takes('{"kind": "cat", "friend": {"kind": "wolf", "age": 3}}')
    assert not made.takes('{"kind": "cat", "age": 3}')
    for first, second in (
        (cat, dog),
        (cat | needs, cat | needs),
        (cat | needs, {"type": "object"}),
    ):
        with pytest.raises((GrammarFailed, InvalidRequest), match="'oneOf'"):
            Enforced(pet | {"$defs": {"cat": first, "dog": second}})


def test_a_discriminator_is_required_of_each_alternative() -> None:
    """Pydantic writes it with a default, and reads no value without it."""
    dog = {"type": "object", "properties": {"kind": {"const": "dog"}, "age": WHOLE}}
    pet: dict[str, Any] = {"oneOf": [{"$ref": "#/$defs/cat"}, dog]}
    tag = {"discriminator": {"propertyName": "kind"}}
    cat = {"type": "object", "properties": {"kind": {"const": "cat"}, "friend": pet | tag}}
    made = Enforced(pet | tag | {"$defs": {"cat": cat}})
    assert made.takes('{"kind": "cat", "friend": {"kind": "dog", "age": 3}}')
    for text in ("{}", '{"age": 3}', '{"kind": "cat", "friend": {}}', '{"kind": "cat", "age": 3}'):
        assert not made.takes(text)


def test_nullable_adds_null_to_the_type_beside_it() -> None:
    """As OpenAPI 3.0.3 says; a value that two alternatives of `oneOf` take is still refused."""
    named = {"type": "string", "format": "date", "nullable": True}
    listed = {"type": "array", "items": TEXT | {"nullable": True}, "nullable": False}
    chosen = {"type": "string", "enum": ["x", None]}
    fields = {"named": named, "listed": listed, "chosen": chosen | {"nullable": True}}
    fields |= {"strict": chosen, "nullable": TRUTH}
    made = Enforced({"type": "object", "properties": fields, "required": list(fields)})
    text = '{"named": null, "listed": ["a", null], "chosen": null, "strict": "x", "nullable": true}'
    assert made.takes(text)
    for wrong in ('"strict": null', '"listed": null', '"nullable": null', '"named": "today"'):
        name = wrong.partition(":")[0]
        assert not made.takes(re.sub(name + r': ("x"|true|null|\[.*?\])', wrong, text))
    cat, dog = (
        {"type": "object", "properties": {"kind": {"const": kind}}, "required": ["kind"]}
        for kind in ("cat", "dog")
    )
    assert Enforced({"oneOf": [cat, dog | {"nullable": True}]}).takes("null")
    with pytest.raises((GrammarFailed, InvalidRequest), match="'oneOf'"):
        Enforced({"oneOf": [cat | {"nullable": True}, dog | {"nullable": True}]})


def test_keys_that_are_listed_are_the_only_ones() -> None:
    keys = {"type": "string", "enum": ["a", "b"]}
    for names in (keys, {"$ref": "#/$defs/keys"}):
        schema = {"type": "object", "propertyNames": names, "additionalProperties": TRUTH}
        made = Enforced(schema | {"required": ["b"], "$defs": {"keys": keys}})
        assert made.takes('{"a": true, "b": false}')
        assert made.takes('{"b": false}')
        for text in ('{"a": true}', '{"b": 1}', '{"b": true, "c": true}'):
            assert not made.takes(text)


def test_references_to_what_is_inside_of_each_other_repeat_no_more_than_fits() -> None:
    schema: dict[str, Any] = {"enum": ["x" * 5000]}
    for depth in range(20):
        schema = {"$anchor": f"a{depth}", "items": schema}
    few, many = ({f"p{i}": {"$ref": f"#a{i}"} for i in range(n)} for n in (3, 20))
    Enforced({"properties": {"whole": schema, **few}})
    with pytest.raises(InvalidRequest, match=r"'\$ref'.* all references mean"):
        enforceable({"properties": {"whole": schema, **many}}, "p")


# ---- patterns ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^.$", "aé", "\n\r\u2028"),
        (r"^\s$", " \n\u00a0\ufeff", "\x85a"),
        (r"^[\s-]$", " -\ufeff", "\x85a"),
        (r"^[\S]$", "a\x85", "\ufeff "),
        (r"^\S$", "a\x85", "\ufeff "),
        ("^[a[]$", "a[", "b"),
        ("^[a&&b]$", "ab&", "c"),
        (r"^\/$", "/", "a"),
        ("^[^]$", "a\n", ""),
        (r"^\d\w$", [], ["٣a", "3é"]),
        (r"^[^\x00-\x1f\x7f]$", "aé", "\n\x01\x7f"),
        (r"^[\v\n]$", "\n", ["", "\v"]),
        (r"^[\x07-\x0b]$", "\n\t", ["", "\v"]),
        (r"^[\x01-]$", "-", ["", "\x01"]),
    ],
)
def test_patterns_mean_what_json_schema_means(pattern: str, good: Any, bad: Any) -> None:
    made = Enforced({"type": "string", "pattern": pattern})
    assert [char for char in good if not made.takes_value(char)] == []
    assert [char for char in bad if made.takes_value(char)] == []


def test_answers_of_formats_are_of_these_formats() -> None:
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    good = {
        "date": ["2024-02-29", "0001-12-31"],
        "time": ["23:59:60Z", "12:00:00.5+01:30"],
        "date-time": ["2016-12-31T23:59:60Z", "2024-02-29T00:00:00Z"],
        "duration": ["P1Y2M3DT4H5M6S", "PT1S", "P3W"],
        "email": ["a.b@c-d.example"],
        "hostname": ["a-b.example"],
        "uri": ["https://a.example/b?c#d"],
        "ipv4": ["127.0.0.1"],
        "ipv6": ["::1"],
        "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
    }
    bad = {
        "date": ["2023-02-29", "0000-01-01", "2024-04-31"],
        "time": ["12:00:60Z", "23:59:60+01:00", "24:00:00Z"],
        "date-time": ["2016-12-31T12:00:60Z", "2016-12-30T23:59:60Z", "2023-02-29T00:00:00Z"],
    }
    for name, texts in good.items():
        for schema in ({"format": name}, {"type": "string", "format": name, "pattern": "..."}):
            made = Enforced(schema)
            assert all(made.takes_value(text) for text in texts), name
            assert not any(made.takes_value(text) for text in bad.get(name, ())), name
        made = Enforced({"type": "string", "format": name})
        for liked in ("0123456789", "9876543210:-.", "PT9-:.Z"):
            text = made.favouring(liked, most=1200)
            assert text.endswith('"'), (name, liked, "it ends")
            if name not in ("uri", "duration"):
                checker.check(json.loads(text), name)


def test_keywords_with_values_of_other_kinds_are_enforced_or_refused() -> None:
    odd: list[Any] = [[], {}, True, 1.5, -1, "x", [[]], [{}], [None]]
    for keyword in (
        *("type", "format", "pattern", "minLength", "items", "prefixItems", "properties", "enum"),
        *("required", "additionalProperties", "patternProperties", "anyOf", "allOf", "$ref"),
        *("minimum", "multipleOf", "uniqueItems", "const", "not", "dependentRequired", "title"),
    ):
        for value in odd:
            with suppress(InvalidRequest, GrammarFailed):
                Enforced({keyword: value})
