"""JSON objects with random properties: any names, any types, nested up to a few levels."""

import random
from typing import Any, Final

from tools.demo_model.skills.json_schemas import Field, schema_of
from tools.demo_model.skills.json_values import (
    Draw,
    city,
    clock_time,
    colour,
    date,
    decimal,
    email,
    identifier,
    integer,
    noun,
    number_between,
    person,
    scalar,
    sentence,
    text,
)
from tools.demo_model.skills.wording import capitalized, invented_word, listed

MAX_DEPTH: Final = 3
NAMED: Final[tuple[tuple[tuple[str, ...], Draw], ...]] = (
    (("name", "user", "person", "author", "first_name", "owner", "friend", "full_name"), person),
    (("city", "place", "town", "location", "address", "destination"), city),
    (("color", "colour"), colour),
    (("title", "label", "subject", "topic", "item", "word", "kind", "category"), noun),
    (("text", "description", "summary", "message", "note", "content", "comment"), sentence),
    (("date", "day", "created_at", "birthday"), date),
    (("time", "start", "end"), clock_time),
    (("email", "mail", "contact"), email),
    (("code", "key", "ref", "sku", "uuid", "id"), identifier),
    (("age", "years"), number_between(1, 99)),
    (("count", "id", "n", "number", "size", "year", "quantity", "level", "x", "y"), integer),
    (("price", "score", "value", "weight", "rating", "total", "temperature", "lat"), decimal),
    (("ok", "is_ok", "active", "valid", "done", "enabled"), lambda rng: rng.random() < 0.5),
)
"""Names that imply their values."""
_LIST_NAMES: Final = ("tags", "items", "names", "values", "numbers", "list", "words", "children")
_OBJECT_NAMES: Final = ("nested", "root", "address", "data", "meta", "user", "settings", "parent")
_LAST_NAMES: Final = ("next", "parent", "child", "more", "left", "right", "value", "extra")
_ODD_NAMES: Final = listed("a b c x-y über é $x foo bar q1 node i")
_ALL_NAMES: Final = tuple(
    {name: None for names, _ in NAMED for name in names}
    | dict.fromkeys((*_LIST_NAMES, *_OBJECT_NAMES, *_LAST_NAMES, *_ODD_NAMES))
)


def invented_name(rng: random.Random) -> str:
    """Draw a property name that probably occurs nowhere else."""
    words = [rng.choice((noun, invented_word))(rng) for _ in range(rng.randint(1, 2))]
    if rng.random() < 0.3:
        return words[0] + "".join(map(capitalized, words[1:]))
    return rng.choice("__- ").join(words)


def _any_name(rng: random.Random) -> str:
    return rng.choice(_ALL_NAMES) if rng.random() < 0.7 else invented_name(rng)


def named_field(rng: random.Random) -> Field:
    """Draw a property with a value that fits its name."""
    names, draw = rng.choice(NAMED)
    value = draw(rng)
    return Field(rng.choice(names), value, schema_of(value))


def choice_field(rng: random.Random, name: str) -> Field:
    """Draw a property whose value is one of a few strings."""
    choices = sorted({rng.choice((noun, colour, invented_word))(rng) for _ in range(3)})
    if rng.random() < 0.2:
        choices = list("abcd"[: rng.randint(2, 4)])
    return Field(name, rng.choice(choices), {"type": "string", "enum": choices})


def any_field(rng: random.Random, depth: int) -> Field:
    """Draw a property of any name and any type; objects and lists are nested up to `depth`."""
    kind = rng.random()
    if kind < 0.3:
        return named_field(rng)
    name = _any_name(rng)
    if kind < 0.38:
        return choice_field(rng, name)
    if kind < 0.78 or depth == 0:
        value = scalar(rng)
    elif kind < 0.89:
        value = [*any_list(rng, depth - 1)]
    else:
        value = any_object(rng, depth - 1)
    return Field(name, value, schema_of(value))


def any_list(rng: random.Random, depth: int) -> list[Any]:
    """Draw a list of up to four values of one type."""
    kind = rng.random()
    if kind < 0.15 and depth > 0:
        return [any_object(rng, depth - 1) for _ in range(rng.randint(0, 2))]
    draw = rng.choices((text, noun, integer, decimal, scalar), (30, 15, 25, 15, 15))[0]
    return [draw(rng) for _ in range(rng.choices(range(5), (12, 30, 28, 20, 10))[0])]


def any_fields(rng: random.Random, depth: int = MAX_DEPTH) -> list[Field]:
    """Draw up to five properties of different names."""
    count = rng.choices(range(6), (4, 30, 28, 22, 11, 5))[0]
    return list(
        {field.name: field for field in (any_field(rng, depth) for _ in range(count))}.values()
    )


def any_object(rng: random.Random, depth: int = MAX_DEPTH) -> dict[str, Any]:
    """Draw an object of up to five properties."""
    return {field.name: field.value for field in any_fields(rng, depth)}
