"""Sentences about a person, and the properties that they state."""

import random
from dataclasses import dataclass
from typing import Any, Final

from tools.demo_model.exchange import is_key_held_out
from tools.demo_model.skills.json_schemas import Field, schema_of
from tools.demo_model.skills.json_values import Draw, city, colour, noun, number_between, person
from tools.demo_model.skills.wording import enumerated

_PLAIN: Final = ("{t}", "{t}", "{t}", "Extract: {t}", "Extract the data: {t}", "Parse this: {t}",
                 "Read this: {t}", "Extract the information from this text: {t}")  # fmt: skip


@dataclass(frozen=True)
class Aspect:
    """An aspect of a person: the property names it may have, and wordings."""

    names: tuple[str, ...]
    draw: Draw
    wordings: tuple[str, ...]


_NAME: Final = ("name", "name", "name", "person", "user", "user_name", "who", "first_name")
_ASPECTS: Final = (
    Aspect(
        ("age", "age", "age", "years", "age_years", "how_old"),
        number_between(1, 99),
        ("is {v} years old", "is {v}", "just turned {v}"),
    ),
    Aspect(
        ("city", "city", "town", "location", "place", "home", "address"),
        city,
        ("lives in {v}", "is from {v}", "comes from {v}", "moved to {v}"),
    ),
    Aspect(
        ("color", "colour", "favorite_color"),
        colour,
        ("likes {v}", "has a {v} car", "wears a {v} hat"),
    ),
    Aspect(
        ("pet", "thing", "item", "owns", "object", "likes"),
        noun,
        ("has a {v}", "owns a {v}", "bought a {v}", "loves the {v}"),
    ),
    Aspect(
        ("count", "number", "n", "num_books", "books"),
        number_between(2, 99),
        ("has {v} books", "bought {v} apples", "sold {v} stones", "has {v} coins"),
    ),
    Aspect(
        ("friend", "sister", "boss", "partner"),
        person,
        ("knows {v}", "is a friend of {v}", "works for {v}", "met {v}"),
    ),
)


def _statement(rng: random.Random) -> tuple[str, list[Field]]:
    name = person(rng)
    fields = [Field(rng.choice(_NAME), name, {"type": "string"})]
    phrases = []
    for aspect in rng.sample(_ASPECTS, rng.choices((1, 2, 3), (60, 32, 8))[0]):
        value: Any = aspect.draw(rng)
        fields.append(Field(rng.choice(aspect.names), value, schema_of(value)))
        phrases.append(rng.choice(aspect.wordings).format(v=value))
    if rng.random() < 0.2:
        rng.shuffle(fields)
    told = f"{name} {enumerated(phrases)}.".replace("..", ".")  # D.C. has one of its own
    return told, list({field.name: field for field in fields}.values())


def draw_statement(rng: random.Random, *, held_out: bool = False) -> tuple[str, list[Field]]:
    """Draw a sentence on the wanted side of the split, and its properties."""
    while True:
        told, fields = _statement(rng)
        if is_key_held_out("extraction", told) == held_out:
            return told, fields


def request(rng: random.Random, told: str) -> str:
    """Ask for the properties in the sentence, or just state it."""
    return rng.choice(_PLAIN).format(t=told)
