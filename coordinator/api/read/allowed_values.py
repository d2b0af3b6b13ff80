"""Finds the values that a field may have, for errors: the decoder says only which one is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from msgspec import Struct, inspect

_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")  # of a path: the name of a field, or [position]
_NUM_SCHEMAS = 64  # more than the API has; looking into one takes milliseconds


def allowed_values(schema: type[Struct], path: str) -> list[Any]:
    """Return the values that `schema` allows at a path like `messages[0].role`; []: not a few."""
    places = [_described(schema)]
    for step in _STEP.findall(path):
        places = [inner for place in places for inner in _inside(place, step)]
    literals = [place for place in places if isinstance(place, inspect.LiteralType)]
    return list(dict.fromkeys(value for literal in literals for value in literal.values))


@lru_cache(maxsize=_NUM_SCHEMAS)
def _described(schema: type[Struct]) -> inspect.Type:
    return inspect.type_info(schema)


def _inside(place: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Iterate over the types that a field or item may have."""
    match place:
        case inspect.StructType(fields=fields, tag_field=tag_field, tag=tag):
            if step == tag_field:
                yield inspect.LiteralType((tag,))
            for field in fields:
                if step == field.encode_name:
                    yield from _alternatives(field.type)
        case inspect.ListType(item_type=inner) | inspect.DictType(value_type=inner):
            yield from _alternatives(inner)
        case _:
            return


def _alternatives(place: inspect.Type) -> Iterator[inspect.Type]:
    match place:
        case inspect.UnionType(types=types):
            for one in types:
                yield from _alternatives(one)
        case inspect.Metadata(type=inner):
            yield from _alternatives(inner)
        case _:
            yield place
