"""Numbers of schemas are enforced exactly as they are given, or refused; and all of them end."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from typing import Any

import msgspec
import pytest

from coordinator.api.read.json_text import check_exact, check_request
from pdserve.shared.errors import GrammarFailed, InvalidRequest
from tests.matrix import matrix
from tests.unit.coordinator.text.enforced import Enforced

# fmt: off
LITERALS = [
    "0", "-1", "9007199254740992", "9007199254740993", "1234567890123456789",
    "-9223372036854775808", "9223372036854775807", "18446744073709551615", "18446744073709551616",
    "1152921504606846976", "100000000000000000000", "123456789012345678901234567890", "0.1", "1.50",
    "-0.0", "1e-9", "0.1234567890123456789", "0.10000000000000000001", "1e23", "6.02e23", "1e300",
    "1e400", "-1e400", "926112073176891.5", "9007199254740993.0", "123456789.123456789", "5e-324",
    "4.35", "2.675",
]
KEYWORDS = [
    "const", "enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
]
# fmt: on


def outcome(text: str) -> Enforced | str:
    """What is enforced of a schema as text, or the message that it is refused with."""
    try:
        check_exact(text.encode(), "schema")
        return Enforced(msgspec.json.decode(text))
    except InvalidRequest as error:
        return error.message


def near(literal: str) -> list[Decimal]:
    """A number and its neighbours of equally many digits, and a little more."""
    number = Decimal(literal)
    step = Decimal(1).scaleb(min(0, int(number.as_tuple().exponent)))
    return [number + k * step for k in (-257, -2, -1, 0, 1, 2, 257)]


def plain(number: Decimal) -> str:
    text = format(number, "f")
    return text.rstrip("0").rstrip(".") if "." in text else text


def fits(number: Decimal, keyword: str, literal: str) -> bool:
    bound = Decimal(literal)
    return {
        "const": number == bound,
        "enum": number == bound,
        "minimum": number >= bound,
        "maximum": number <= bound,
        "exclusiveMinimum": number > bound,
        "exclusiveMaximum": number < bound,
        "multipleOf": not bound or number % bound == 0,
    }[keyword]


@pytest.mark.parametrize("keyword", matrix(KEYWORDS, 2))
def test_no_literal_is_enforced_as_another_one(keyword: str) -> None:
    num_enforced = 0
    for literal in LITERALS:
        said = f"[{literal}]" if keyword == "enum" else literal
        for kind in ("", '"type": "integer", ', '"type": "number", '):
            for text in (
                f'{{{kind}"{keyword}": {said}}}',
                f'{{"$defs": {{"d": {{{kind}"{keyword}": {said}}}}}, "$ref": "#/$defs/d"}}',
            ):
                made = outcome(text)
                if isinstance(made, str):
                    assert keyword in made, (text, made)
                    continue
                num_enforced += 1
                let_through = [n for n in near(literal) if made.takes(plain(n))]
                assert [n for n in let_through if not fits(n, keyword, literal)] == [], text
    assert num_enforced > len(LITERALS), "most are"


def test_constants_are_exact_wherever_they_are() -> None:
    for value in ([1234567890123456789], {"a": {"b": [1.5, 2**53 + 1]}}):
        with pytest.raises(InvalidRequest, match=r"'enum' in '#/properties/x/[0a]"):
            Enforced({"properties": {"x": {"enum": [value]}}})
    value = {"a": [2**60, 1.5, -(2**62)]}
    assert Enforced({"const": value}).takes_value(value)


LONG = f'{{"description": "{"x" * 200_000}", "const": 1e2}}'


@pytest.mark.parametrize(
    ("request_text", "path"),
    [
        ('{"guided_json": {"maximum": 1e400}}', "guided_json.maximum"),
        (
            '{"tools": [{"function": {"parameters": {"properties": {"default": {"const": '
            "0.12345678901234567891}}}}}]}",
            "tools.0.function.parameters.properties.default.const",
        ),
        ('{"response": {"text": {"format": {"enum": [1.00000000000000000001]}}}}', "response.text"),
        ('{"guided_json": {"default": 0.12345678901234567891, "maximum": 0.1}}', None),
        ('{"temperature": 0.70000000000000000001, "tools": [{"x": 1.50, "y": 1e2}]}', None),
        ('{"messages": [{"content": "0.12345678901234567891"}]}', None),
        ('{"tools": [1e400', None),  # no JSON, as is said elsewhere
        (f'{{"tools": [{LONG}, {LONG}, {{"x": 0.12345678901234567891}}]}}', "tools.2.x' is 0.1234"),
        (
            f'{{"response": {{"input": "{"x" * 2**20}", "tools": [{{"const": 1e400}}]}}}}',
            "response.tools.0.const",
        ),
        (
            f'{{"tools": [{LONG}, {{"d": "{"x" * 2**18}", "const": 1e400}}]}}',
            "tools.1' has numbers of 16 digits or an exponent, and 2621",
        ),
        (f'{{"tools": [{{"d": "{"x" * 2**18}", "const": 15}}]}}', None),
    ],
)
def test_rounded_numbers_are_found_in_schemas_only(request_text: str, path: str | None) -> None:
    if path is None:
        check_request(request_text.encode())
        return
    with pytest.raises(InvalidRequest) as caught:
        check_request(request_text.encode())
    assert caught.value.message.startswith(f"'{path}")


# ---- bounds --------------------------------------------------------------------------------------

INTEGERS = [
    *((-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) for bits in (8, 16, 32, 64)),
    *((0, 2**bits - 1) for bits in (8, 16, 32, 64)),
    (-(10**400), 10**400),
    (10**18, None),
    (None, -(10**18)),
]
FLOATS = [(-3.4028234663852886e38, 3.4028234663852886e38), (-1.7e308, 1.7e308), (-1e20, 1e20)]


@pytest.mark.parametrize("are_exclusive", [False, True])
def test_bounds_of_machine_types_are_narrowed(are_exclusive: bool) -> None:
    names = ("exclusiveMinimum", "exclusiveMaximum") if are_exclusive else ("minimum", "maximum")
    for kind, ranges in (("integer", INTEGERS), ("number", FLOATS), ("integer", FLOATS)):
        for ends in ranges:
            bounds = {n: end for n, end in zip(names, ends, strict=True) if end is not None}
            made = Enforced({"type": kind} | bounds)
            lowest, highest = (
                -math.inf if ends[0] is None else ends[0],
                math.inf if ends[1] is None else ends[1],
            )
            for value in (-129, -128, 0, 127, 128, 255, 256, 2**31, 10**18 + 128, *ends):
                if not isinstance(value, int):
                    continue
                is_in = lowest < value < highest if are_exclusive else lowest <= value <= highest
                if abs(value) < 10**14:
                    assert made.takes(str(value)) == is_in, (kind, ends, value)
                assert is_in or not made.takes(str(value))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 3, "maximum": 2},
        {"type": "integer", "exclusiveMinimum": 2, "exclusiveMaximum": 3},
        {"type": "integer", "minimum": 2.1, "maximum": 2.9},
        {"type": "integer", "minimum": 2**63},
        {"type": "integer", "maximum": -1e20},
        {"type": "number", "minimum": 2, "exclusiveMaximum": 2},
        {"type": "number", "minimum": 1e20},
        {"type": "number", "exclusiveMaximum": -1e38},
    ],
)
def test_bounds_that_leave_nothing_are_named(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=r"imum'.* in '#'"):
        Enforced(schema)


def test_what_is_beyond_a_bound_is_never_let_through() -> None:
    """Also where the library's own ranges are wrong: zero beyond an exclusive bound, and others."""
    draw = random.Random(7)
    for _ in range(300):
        lowest = Decimal(draw.choice([0, 1, -1, 5, draw.randint(-(10**6), 10**6)])).scaleb(
            -draw.choice([0, 0, 1, 3, 6])
        )
        width = Decimal(draw.choice([1, 5, 10, 99, 10**7])).scaleb(-draw.choice([0, 1, 4]))
        ends = (lowest, lowest + width)
        names = [draw.choice(["m", "exclusiveM"]) for _ in ends]
        schema: dict[str, Any] = {"type": "number"}
        for name, end, tail in zip(names, ends, ("inimum", "aximum"), strict=True):
            schema[name + tail] = int(end) if end == int(end) else float(end)
        made = Enforced(schema)
        steps = [Decimal(sign).scaleb(-n) for sign in (-1, 0, 1) for n in (0, 1, 6, 9)]
        for number in [Decimal(0), *(end + step for end in ends for step in steps)]:
            is_in = all(
                fits(number, name + tail, str(end))
                for name, end, tail in zip(names, ends, ("inimum", "aximum"), strict=True)
            )
            assert is_in or not made.takes(plain(number)), (schema, number)
        inside = plain((ends[0] + width / 2).quantize(Decimal("1e-9")))
        assert made.takes(inside) or made.takes(inside + "0"), (schema, inside)


def test_numbers_before_an_exclusive_bound_may_be_short() -> None:
    made = Enforced({"type": "number", "minimum": 0, "exclusiveMaximum": 1})
    assert made.takes("0.9")
    assert made.takes("0.999")
    assert not made.takes("1")
    assert not made.takes("1.0")


# ---- ends ----------------------------------------------------------------------------------------

OPEN: list[dict[str, Any]] = [
    {"type": kind} | bounds
    for kind in ("integer", "number")
    for bounds in (
        {},
        {"minimum": 0},
        {"maximum": 0},
        {"exclusiveMinimum": -5},
        {"exclusiveMaximum": 10**6},
        {"minimum": 10**12},
        {"maximum": -(10**12)},
        {"multipleOf": 1},
        {"multipleOf": 5, "minimum": 1},
        {"minimum": 0.5, "maximum": 2.5},
    )
]
OPEN += [
    {"minimum": 0},
    {"type": ["integer", "null"], "minimum": 1},
    {"type": ["integer", "number"]},
    {"allOf": [{"type": "integer"}, {"minimum": 0}]},
    {"allOf": [{"type": "number"}, {"multipleOf": 0.01}, {"minimum": 0}]},
    {"type": "number", "anyOf": [{"minimum": 5}, {"maximum": -5}]},
    {"$defs": {"n": {"type": "number"}}, "$ref": "#/$defs/n", "minimum": 0},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "number"}]},
    {},
    {"$defs": {"n": {}}, "$ref": "#/$defs/n"},
]


@pytest.mark.parametrize("schema", matrix(OPEN, 6))
def test_a_model_that_favours_digits_ends(schema: dict[str, Any]) -> None:
    for liked in ("9876543210.-", "0123456789", "-1.0", ".1e+"):
        text = Enforced(schema).favouring(liked, most=40)
        assert len(text) <= 26, text
        if "integer" in str(schema.get("type")) and "number" not in str(schema.get("type")):
            assert len(text.lstrip("-")) <= 18, text


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "maxItems": 1},
        {"type": "array", "items": {}, "maxItems": 1},
        {"type": "array", "prefixItems": [True], "items": False},
        {"type": "object", "required": ["a"], "maxProperties": 1},
        {"properties": {"a": {"title": "x"}}, "required": ["a"], "type": "object"},
        {"type": "object", "patternProperties": {"^a$": {}}, "minProperties": 1}
        | {"maxProperties": 1, "additionalProperties": False},
    ],
)
def test_numbers_in_values_of_any_kind_end(schema: dict[str, Any]) -> None:
    text = Enforced(schema).favouring("9876543210.-", most=60)
    assert text[-1] in "]}"


def test_multiples_that_are_combined_beyond_what_is_counted_are_refused() -> None:
    parts = [{"multipleOf": 99991}, {"multipleOf": 99989}]
    with pytest.raises(InvalidRequest, match="'multipleOf' in '#/allOf/0'"):
        Enforced({"allOf": parts})
    made = Enforced({"type": "number", "allOf": [{"multipleOf": 0.5}, {"multipleOf": 3}]})
    assert made.takes("4.5") is False
    assert made.takes("6")


def test_a_multiple_that_patterns_overlap_with_is_told_without_inner_names() -> None:
    schema = {
        "patternProperties": {"a": {"multipleOf": 2}, "^a": {"multipleOf": 3}},
        "type": "object",
    }
    with pytest.raises(GrammarFailed, match="'patternProperties'"):
        Enforced(schema)
