"""Grammars of arguments that are written one by one, each with its name, and not as one object.

Qwen3-Coder writes them as tags, with strings as plain text; Llama writes Python's keywords. Each
value is a grammar of its own, of the schema's property.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from coordinator.text.grammars.outputs import Part, json_part, quoted, text_that_ends
from coordinator.text.parts.tagged_call import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END
from coordinator.text.parts.typed_values import choices_of, constraints_of, kinds_of
from pdserve.shared.errors import InvalidRequest

# Of the arguments as a whole: what is heeded, and what says nothing of their values.
_HEEDED = frozenset(
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
)
_REMARKS = frozenset(("title", "description", "default", "examples", "$schema", "$id", "$comment"))
_KEY = re.compile(r"[\w.-]{1,128}")
T = TypeVar("T")
_TEXT_END = f"\n{PARAMETER_END}"
_OF_STRINGS = ("pattern", "format")
_OTHERS = "others"  # in names of rules, in place of an argument's index


@dataclass(frozen=True, slots=True)
class _Argument:
    key: str
    schema: Mapping[str, Any]
    is_required: bool


class ArgumentList:
    """The arguments of the function with this index among those offered."""

    def __init__(self, index: int, schema: Mapping[str, Any] | None, param: str) -> None:
        """Raises InvalidRequest, which names `param`, the request's parameter of the schema."""
        self._index = index
        self._param = param
        self._schema = schema or {}
        listed = self._given("properties", dict, {})
        for keyword in self._schema.keys() - _HEEDED - _REMARKS:
            raise self._unsupported(keyword)
        required = [str(key) for key in self._given("required", list, [])]
        unlisted: dict[str, Any] = {key: {} for key in required if key not in listed}
        self._arguments = [
            _Argument(key, inner if isinstance(inner, dict) else {}, key in required)
            for key, inner in (listed | unlisted).items()
        ]
        for key in listed | unlisted:
            if not _KEY.fullmatch(key):
                raise self._unsupported(f"properties.{key}"[:128])
        others = self._schema.get("additionalProperties")
        self._others: _Argument | None = None  # any, where none is listed
        if not (self._arguments or schema is None or others is False):
            self._others = _Argument(
                "additionalProperties", others if isinstance(others, dict) else {}, False
            )
        self.parts: dict[str, Part] = {}

    def tagged(self, name: str) -> list[str]:
        """Return Lark rules, of which the first is a call as tags. Raises InvalidRequest."""
        rules = [
            self._tag(i, argument, quoted(f"{PARAMETER}{argument.key}>\n"))
            for i, argument in enumerate(self._arguments)
        ]
        told = [
            f"argument_{self._index}_{i}{'' if argument.is_required else '?'}"
            for i, argument in enumerate(self._arguments)
        ]
        if self._others is not None:
            begin = f'{quoted(PARAMETER)} /[^<>\\n]{{1,64}}/ ">\\n"'
            rules.append(self._tag(_OTHERS, self._others, begin))
            told = [f"argument_{self._index}_{_OTHERS}*"]
        body = " ".join([quoted(f"{FUNCTION}{name}>\n"), *told, quoted(FUNCTION_END)])
        return [f"body_{self._index}: {body}", *rules]

    def pythonic(self, name: str) -> list[str]:
        """Return Lark rules, of which the first is a call in Python. Raises InvalidRequest."""
        at, end = self._index, len(self._arguments)
        rules = [f"body_{at}: {quoted(f'{name}(')} head_{at}_0 {quoted(')')}"]
        if self._others is not None:
            value = self._value(_OTHERS, self._others.schema)
            keyword = f'/[a-zA-Z_][a-zA-Z0-9_]{{0,63}}/ "=" {value}'
            return [*rules, f'head_{at}_0: ({keyword} (", " {keyword})*)?']
        for i, argument in enumerate(self._arguments):
            value = self._value(i, argument.schema)
            rules.append(f"argument_{at}_{i}: {quoted(f'{argument.key}=')} {value}")
            this, rest = f"argument_{at}_{i}", f"tail_{at}_{i + 1}"
            skip = "" if argument.is_required else f" | head_{at}_{i + 1}"
            rules.append(f"head_{at}_{i}: {this} {rest}{skip}")
            mark = "" if argument.is_required else "?"
            rules.append(f'tail_{at}_{i}: (", " {this}){mark} {rest}')
        return [*rules, f'head_{at}_{end}: ""', f'tail_{at}_{end}: ""']

    # ---- parts ---------------------------------------------------------------------------------

    def _given(self, keyword: str, kind: type[T], default: T) -> T:
        value = self._schema.get(keyword)
        if value is not None and not isinstance(value, kind):
            raise InvalidRequest(f"{keyword!r} in {self._param!r} has the wrong type", self._param)
        return value or default

    def _tag(self, index: int | str, argument: _Argument, begin: str) -> str:
        end = quoted(f"\n{PARAMETER_END}\n")
        schema, name = argument.schema, f"argument_{self._index}_{index}"
        if choices := choices_of(schema, self._schema):
            told = " | ".join(
                quoted(choice if isinstance(choice, str) else json.dumps(choice))
                for choice in choices
            )
            return f"{name}: {begin} ({told}) {end}"
        kinds = kinds_of(schema, self._schema)
        if kinds and "string" not in kinds:
            return f"{name}: {begin} {self._value(index, schema)} {end}"
        least, most = self._lengths(argument)
        if (least, most) == (0, None):
            return f'{name}: {begin} argument_text "\\n"'
        text = text_that_ends(_TEXT_END, least, most)
        return f'{name}: {begin} {name}_text "\\n"\n{name}_text[lazy]: {text}'

    def _lengths(self, argument: _Argument) -> tuple[int, int | None]:
        """Return the least and the greatest length of a string; None: unlimited."""
        given = constraints_of(argument.schema, self._schema)
        for keyword in _OF_STRINGS:
            if keyword in given:
                raise self._unsupported(f"{argument.key}.{keyword}")
        least, most = given.get("minLength", [0]), given.get("maxLength", [None])
        for keyword, values in (("minLength", least), ("maxLength", most)):
            if len(values) > 1 or not isinstance(values[0], int | None):
                raise self._unsupported(f"{argument.key}.{keyword}")
        return least[0], most[0]

    def _value(self, index: int | str, schema: Mapping[str, Any]) -> str:
        """Return the reference to the grammar of a value as JSON."""
        shared = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
        name = f"value_{self._index}_{index}"
        self.parts[name] = json_part({**shared, **schema}, self._param)
        return f"@{name}"

    def _unsupported(self, keyword: str) -> InvalidRequest:
        return InvalidRequest(
            f"{self._param!r} cannot be enforced: {keyword!r} is not supported in the format in "
            "which this model writes tool calls",
            self._param,
        )


def shared_rules() -> list[str]:
    """Return the Lark rules that the calls of all functions refer to."""
    return [f"argument_text[lazy]: {text_that_ends(_TEXT_END)}"]
