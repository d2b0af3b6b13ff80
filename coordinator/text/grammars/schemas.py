"""Reads a client's JSON schema into one that the grammar library enforces to the letter.

What says nothing of an instance is left out, with the keywords that schema generators write out of
habit. What cannot be enforced exactly is refused, with its path and its keyword. Every instance of
the schema that is made is also one of the client's: numbers, formats and unlisted properties are
narrowed where authors meant less than they wrote (`numbers`, `formats`, `closing`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from coordinator.text.grammars.alternatives import are_told_apart, requiring, tag_of
from coordinator.text.grammars.anything import filled
from coordinator.text.grammars.closing import closed
from coordinator.text.grammars.endings import endless
from coordinator.text.grammars.formats import narrow_format
from coordinator.text.grammars.keywords import (
    COUNTS,
    ENFORCED,
    LISTS,
    REMARKS,
    TYPES,
    UNEVALUATED,
    is_about,
    is_any,
    is_of,
    types_of,
    unsupported,
)
from coordinator.text.grammars.numbers import NumberRules, check_value, multiples_of
from coordinator.text.grammars.patterns import looks_around, translated
from coordinator.text.grammars.places import SchemaPlace
from coordinator.text.grammars.references import References, check_ends, definition
from pdserve.grammar import MAX_GRAMMAR_CHARS

_MAX_COUNT = 2**32 - 1
_NO_SPELLING = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
_REPEATS = f"is one too many: what all references mean has over {MAX_GRAMMAR_CHARS} characters"
_ENDLESS = "leads back to it in each value, so that none ends: allow null, or require it nowhere"
_COMBINE = ("allOf", "anyOf", "oneOf", "$ref")


def enforceable(schema: dict[str, Any], param: str) -> dict[str, Any]:
    """Return what is enforced of a schema. Raises InvalidRequest, with the path and the keyword."""
    return SchemaReader(schema, param).read()


class SchemaReader:
    """Reads one schema and what it refers to."""

    def __init__(self, schema: dict[str, Any], param: str) -> None:
        self._schema = schema
        self._param = param
        self._references = References(schema, param)
        self._numbers = _number_rules(schema)
        self._places: dict[str, SchemaPlace] = {}  # reference |-> what it means
        self._pending: list[tuple[str, str, Any, SchemaPlace]] = []

    def read(self) -> dict[str, Any]:
        """Return the whole schema. Raises InvalidRequest."""
        made = self._node(self._schema, SchemaPlace(self._param))
        definitions: dict[str, Any] = {}
        links: dict[str, tuple[str, SchemaPlace]] = {}
        referred: dict[str, Any] = {}
        num_chars = 0
        while self._pending:
            name, reference, schema, place = self._pending.pop()
            one = definitions[name] = referred[reference] = self._node(schema, place)
            if isinstance(one, dict) and one.keys() == {"$ref"}:
                links[reference] = one["$ref"], place
            num_chars += len(msgspec.json.encode(one))
            if num_chars > MAX_GRAMMAR_CHARS:  # one inside of another is there twice
                raise place.refusal("$ref", _REPEATS)
        check_ends(links)
        if (one := endless(referred)) is not None:
            raise self._places[one].refusal("$ref", _ENDLESS)
        if made is False or made == {"anyOf": []}:
            raise SchemaPlace(self._param).refusal("anyOf", "leaves no value")
        made = {} if made is True else made
        made = closed(made | {"$defs": definitions} if definitions else made)
        return made if any(map(_combines, _nodes(made))) else filled(made)

    # ---- one schema ----------------------------------------------------------------------------

    def _node(self, schema: Any, place: SchemaPlace, *, is_exclusive: bool = False) -> Any:
        """Read one schema; `is_exclusive`: values of it must not fit another one."""
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            name = place.path[-1] if place.path else ""
            raise place.refusal(name, "must be a schema: an object, or true or false")
        _check_type(schema, place)
        keys = self._listed_keys(schema, place)
        if keys:
            schema = {name: one for name, one in schema.items() if name != "propertyNames"}
        if names := unsupported(schema):
            raise place.refusal(
                names, "is not supported" if len(names) == 1 else "are not supported"
            )
        types = types_of(schema)
        if types is not None and schema.get("nullable") is True:
            schema = schema | {"type": sorted(types)}
        made: dict[str, Any] = {}
        for keyword, value in schema.items():
            is_said = value is not None or keyword == "const"  # some clients send what they lack
            if keyword in ENFORCED and is_said and is_about(keyword, types):
                if keyword in LISTS and (keyword != "items" or isinstance(value, list)):
                    self._list(made, keyword, schema, place, is_exclusive)
                else:
                    self._keyword(made, keyword, value, place, types)
        for keyword, other in UNEVALUATED.items():  # alone, they are what their others are
            if keyword in schema and other not in made and is_about(keyword, types):
                made[other] = self._node(schema[keyword], place.at(keyword))
        if keys:
            made["properties"] = dict.fromkeys(keys, made.get("additionalProperties", True))
            made["additionalProperties"] = False
        narrow_format(made, types, place)
        self._numbers.narrow(made, types, place)
        _check_counts(made, place)
        return _alone(made)

    def _keyword(
        self,
        made: dict[str, Any],
        keyword: str,
        value: Any,
        place: SchemaPlace,
        types: frozenset[str] | None,
    ) -> None:
        """Read a keyword that does not hold a list of schemas."""
        match keyword:
            case "enum" | "const":
                made[keyword] = _values(keyword, value, types, place)
            case "$ref":
                made[keyword] = self._reference(value, place)
            case "pattern":
                if value != "":
                    made[keyword] = translated(value, keyword, place)
            case "required":
                made[keyword] = _names_in(value, place)
            case "properties" | "patternProperties":
                made[keyword] = self._mapping(keyword, value, place)
            case "items" | "additionalItems" | "additionalProperties":
                made[keyword] = self._node(value, place.at(keyword))
            case _ if keyword in COUNTS:
                count = _count(value, keyword, place)
                if count or keyword.startswith("max"):
                    made[keyword] = count
            case _:
                made[keyword] = value

    def _list(
        self,
        made: dict[str, Any],
        keyword: str,
        schema: dict[str, Any],
        place: SchemaPlace,
        is_exclusive: bool,
    ) -> None:
        value = schema[keyword]
        if not isinstance(value, list) or not (value or keyword == "prefixItems"):
            raise place.refusal(keyword, "must be a list of schemas")
        must_differ = is_exclusive or keyword == "oneOf"
        chosen = list(enumerate(value))
        if keyword == "anyOf" and not must_differ:
            chosen = _likely(chosen)
        inside = place.at(keyword)
        tag = tag_of(schema) if keyword == "oneOf" else ""
        parts = [
            self._tagged(one, tag, inside.at(i))
            if tag
            else self._node(one, inside.at(i), is_exclusive=must_differ)
            for i, one in chosen
        ]
        if keyword == "allOf":
            parts = [one for one in parts if not is_any(one)]
        if keyword == "anyOf" and any(is_any(one) for one in parts):
            return  # it says nothing
        targets = [requiring(self._meant(one, place)[0], tag) for one in value]
        if keyword == "oneOf" and "anyOf" not in schema and are_told_apart(targets):
            keyword = "anyOf"
        if parts:
            made[keyword] = parts

    def _meant(self, schema: Any, place: SchemaPlace) -> tuple[Any, SchemaPlace]:
        """Return what a schema is that may be nothing but a reference, and where that stands."""
        if isinstance(schema, dict) and schema.keys() - REMARKS == {"$ref"}:
            return self._references.target(schema["$ref"], place)
        return schema, place

    def _mapping(self, keyword: str, value: Any, place: SchemaPlace) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise place.refusal(keyword, "must be an object of schemas")
        inside = place.at(keyword)
        made = {name: self._node(one, inside.at(name)) for name, one in value.items()}
        if keyword == "properties":
            return made
        return {translated(name, keyword, place): one for name, one in made.items()}

    def _listed_keys(self, schema: dict[str, Any], place: SchemaPlace) -> list[str]:
        """Return the only keys that an object may have, as `propertyNames` lists them, if it does.

        Then they can be `properties`, of what `additionalProperties` says, as both mean the same.
        """
        others = ("properties", "patternProperties", "unevaluatedProperties")
        if "propertyNames" not in schema or any(name in schema for name in others):
            return []
        names, _ = self._meant(schema["propertyNames"], place)
        if not isinstance(names, dict) or names.keys() - REMARKS - {"type"} != {"enum"}:
            return []
        keys = names["enum"] if names.get("type", "string") == "string" else []
        return keys if isinstance(keys, list) and all(isinstance(k, str) for k in keys) else []

    def _tagged(self, schema: Any, tag: str, place: SchemaPlace) -> Any:
        """Read an alternative in which the property `tag` is required, if it is listed there."""
        target, at = self._meant(schema, place)
        told = requiring(target, tag)
        if told is target or target is schema:
            return self._node(told if target is schema else schema, place, is_exclusive=True)
        return {"$ref": self._defined((*at.path, "required", tag), told, at)}

    def _reference(self, reference: Any, place: SchemaPlace) -> str:
        target, at = self._references.target(reference, place)
        return self._defined(at.path, target, at)

    def _defined(self, path: tuple[str, ...], schema: Any, place: SchemaPlace) -> str:
        """Return a reference to a schema, which is defined once under this path."""
        name, ours = definition(path)
        if ours not in self._places:
            self._places[ours] = place
            self._pending.append((name, ours, schema, place))
        return ours


def _check_type(schema: dict[str, Any], place: SchemaPlace) -> None:
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [] if kind is None else [kind]
    wrong = [one for one in kinds if not isinstance(one, str) or one not in TYPES]
    if wrong or kind == []:
        shown = repr(wrong[0])[:40] if wrong else "empty"
        raise place.refusal("type", f"is {shown}, but must be of {', '.join(sorted(TYPES))}")


def _values(keyword: str, value: Any, types: frozenset[str] | None, place: SchemaPlace) -> Any:
    """Return the values of `enum` or `const`; those of other types are left out of `enum`."""
    if keyword == "enum" and not isinstance(value, list):
        raise place.refusal(keyword, "must be a list of values")
    given = value if keyword == "enum" else [value]
    if any(map(_has_unspellable, given)):
        raise place.refusal(keyword, "has a control character, which is not supported")
    found = [check_value(one, keyword, place) for one in given if is_of(one, types)]
    if not found:
        raise place.refusal(keyword, "leaves no value")
    return found if keyword == "enum" else found[0]


def _number_rules(schema: dict[str, Any]) -> NumberRules:
    nodes = list(_nodes(schema))
    combines = any(_combines(node) for node in nodes)
    return NumberRules(multiples_of(nodes), combines=combines)


def _combines(node: dict[str, Any]) -> bool:
    """Whether more than one schema may apply to the same value."""
    said = node.keys() - REMARKS
    return "allOf" in said or any(name in said and len(said) > 1 for name in _COMBINE)


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over all objects in a schema: its subschemas, but also e.g. constants."""
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _nodes(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _nodes(value)


def _alone(made: dict[str, Any]) -> Any:
    """Return what an `allOf` of one schema is, if there is nothing else."""
    parts = made.get("allOf", ())
    return parts[0] if made.keys() == {"allOf"} and len(parts) == 1 else made


def _likely(alternatives: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Return the alternatives that can be enforced, if there are any; null alone is none."""
    found = [(i, one) for i, one in alternatives if not _is_unlikely(one)]
    return found if any(one != {"type": "null"} for _, one in found) else alternatives


def _is_unlikely(schema: Any) -> bool:
    return isinstance(schema, dict) and looks_around(schema.get("pattern"))


def _names_in(value: Any, place: SchemaPlace) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise place.refusal("required", "must be a list of names")
    return list(dict.fromkeys(value))


def _count(value: Any, keyword: str, place: SchemaPlace) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0 or value != value // 1:
        raise place.refusal(keyword, "must be a whole number, 0 or more")
    if value > _MAX_COUNT:
        raise place.refusal(keyword, f"is more than {_MAX_COUNT}")
    return int(value)


def _check_counts(made: dict[str, Any], place: SchemaPlace) -> None:
    """Refuse counts that leave nothing, or whose keys a model could repeat."""
    for kind in ("Items", "Length", "Properties"):
        if made.get(f"min{kind}", 0) > made.get(f"max{kind}", _MAX_COUNT):
            raise place.refusal([f"min{kind}", f"max{kind}"], "leave no value")
    required = made.get("required", ())
    missing = made.get("minProperties", 0) - len(required)
    if missing > 1:
        raise place.refusal(
            "minProperties",
            "asks for two keys that are not in 'required', which "
            "a grammar cannot keep from being the same",
        )
    if made.get("properties", {}).keys() - required and not _is_choice(made, missing):
        given = [name for name in ("minProperties", "maxProperties") if name in made]
        raise place.refusal(given, "can be enforced only where all of 'properties' are 'required'")


def _is_choice(made: dict[str, Any], missing: int) -> bool:
    """Whether optional properties are counted in a way that is supported: at least or most one."""
    most = made.get("maxProperties")
    if missing < 1 and most is None:
        return True
    is_one = most is None or most - len(made.get("required", ())) == 1
    is_closed = made.get("additionalProperties") is False and "patternProperties" not in made
    return is_one and is_closed


def _has_unspellable(value: Any) -> bool:
    """Whether a text needs an escape that is not allowed: the ways to spell a key would differ."""
    if isinstance(value, str):
        return _NO_SPELLING.search(value) is not None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(_has_unspellable(one) for one in inner)
