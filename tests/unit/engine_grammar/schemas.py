"""Random JSON schemas, of the keywords that are enforced."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_names = st.sampled_from(["a", "b", "name", "é", 'quo"te', "two words", "$x", "\\n"])
_texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=6)
_numbers = st.integers(-1000, 1000)


@st.composite
def _string(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["length", "pattern", "format", "enum"]))
    if kind == "length":
        shortest = draw(st.integers(0, 3))
        return {"type": "string", "minLength": shortest, "maxLength": shortest + 5}
    if kind == "pattern":
        patterns = ["^[a-c]{2,4}$", "^x+-\\d{1,3}$", "^(yes|no|maybe)$", '^[^"\\\\]?é$']
        return {"type": "string", "pattern": draw(st.sampled_from(patterns))}
    if kind == "format":
        formats = ["date", "date-time", "time", "ipv4", "uuid"]
        return {"type": "string", "format": draw(st.sampled_from(formats))}
    return {"enum": draw(st.lists(_texts, min_size=1, max_size=4, unique=True))}


@st.composite
def _number(draw: st.DrawFn) -> dict[str, Any]:
    lowest, width = draw(_numbers), draw(st.integers(0, 500))
    kind = draw(st.sampled_from(["integer", "number", "multiple", "const"]))
    if kind == "const":
        return {"const": lowest}
    if kind == "multiple":
        return {"type": "integer", "multipleOf": draw(st.integers(1, 12)), "minimum": 0} | {
            "maximum": 5000
        }
    return {"type": kind, "minimum": lowest, "maximum": lowest + width}


_leaves = st.one_of(
    _string(), _number(), st.just({"type": "boolean"}), st.just({"type": ["null", "boolean"]})
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(_arrays(inner), _objects(inner), _unions(inner))


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    fewest = draw(st.integers(0, 2))
    schema: dict[str, Any] = {"type": "array", "items": draw(inner), "minItems": fewest}
    schema["maxItems"] = fewest + draw(st.integers(0, 2))
    if draw(st.booleans()):
        schema["prefixItems"] = [draw(inner)]
    return schema


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(_names, inner, max_size=4))
    required = [name for name in properties if draw(st.booleans())]
    schema = {"type": "object", "properties": properties, "required": required}
    return schema | {"additionalProperties": False}


def _unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several})


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """Nested, bounded in size, some with a definition that refers to itself."""
    schema: dict[str, Any] = draw(st.recursive(_leaves, _containers, max_leaves=6))
    if draw(st.integers(0, 4)):
        return schema
    again = {"$ref": "#/$defs/n"}
    node = {
        "type": "object",
        "properties": {
            "value": schema,
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"n": node}} | again
