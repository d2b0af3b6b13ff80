"""Short JSON values of every type.

The most important thing to learn is that every value ends: strings after a few words, whatever they
contain; numbers after a few digits.
"""

import random
from collections.abc import Callable
from typing import Any, Final

from tools.demo_model.skills.facts import CAPITALS, COLOURS, DAYS, EMOJI, MONTHS, WORDS
from tools.demo_model.skills.smalltalk import NAMES
from tools.demo_model.skills.stories import ANIMALS, PLACES, THINGS
from tools.demo_model.skills.wording import capitalized, invented_word

Draw = Callable[[random.Random], Any]

_CITIES: Final = tuple(city for _, city in CAPITALS)
_COLOURS: Final = tuple(sorted({colour for _, colour in COLOURS}))
_EMOJI: Final = tuple(symbol for _, symbol in EMOJI)
_NOISE: Final = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -_.,:;!?'/@#$%&*+=()é"
)


def number_between(lowest: int, highest: int) -> Draw:
    """Return a function that draws whole numbers, both ends included."""
    return lambda rng: rng.randint(lowest, highest)


def person(rng: random.Random) -> str:
    """Draw a first name, known or not."""
    return rng.choice(NAMES) if rng.random() < 0.6 else capitalized(invented_word(rng))


def city(rng: random.Random) -> str:
    """Draw the name of a city, known or not."""
    return rng.choice(_CITIES) if rng.random() < 0.6 else capitalized(invented_word(rng))


def noun(rng: random.Random) -> str:
    """Draw the name of a thing."""
    return rng.choice(rng.choice((WORDS, ANIMALS, PLACES, THINGS)))


def colour(rng: random.Random) -> str:
    """Draw a colour."""
    return rng.choice(_COLOURS)


def phrase(rng: random.Random) -> str:
    """Draw two or three words."""
    return " ".join(noun(rng) for _ in range(rng.randint(2, 3)))


def sentence(rng: random.Random) -> str:
    """Draw one short sentence."""
    form = rng.choice(
        ("The {a} is {c}.", "A {a} and a {b}.", "{n} likes the {a}.", "{n} has a {c} {a}.")
    )
    return form.format(a=noun(rng), b=noun(rng), c=colour(rng), n=person(rng))


def date(rng: random.Random) -> str:
    """Draw a date in ISO 8601 format."""
    return f"{rng.randint(1950, 2030)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"


def clock_time(rng: random.Random) -> str:
    """Draw a time of day, with seconds or without."""
    seconds = rng.choice(("", f":{rng.randrange(60):02}", f":{rng.randrange(60):02}Z"))
    return f"{rng.randrange(24):02}:{rng.randrange(60):02}{seconds}"


def email(rng: random.Random) -> str:
    """Draw an e-mail address."""
    return f"{person(rng).lower()}@{rng.choice(('example', noun(rng)))}.{rng.choice(_DOMAINS)}"


def identifier(rng: random.Random) -> str:
    """Draw something like a number plate or a key."""
    letters = invented_word(rng)[:3]
    return rng.choice(("{l}-{n}", "{l}{n}", "{l}_{n}", "{n}-{l}", "{n}")).format(
        l=rng.choice((letters, letters.upper())), n=rng.randrange(10_000)
    )


def _noise(rng: random.Random) -> str:
    """Draw meaningless characters: such strings must end, too."""
    return "".join(rng.choice(_NOISE) for _ in range(rng.randrange(13)))


def _noisy_words(rng: random.Random) -> str:
    """Draw pieces of words and numbers in a row."""
    pieces = (*WORDS[:40], "0", "12", "7", " ", ".", ", ", "\n", '"', "é", *_EMOJI[:5], "ing", "ed")
    return "".join(rng.choice(pieces) for _ in range(rng.randint(1, 5)))


_DOMAINS: Final = ("com", "org", "net", "de")
_TEXTS: Final[tuple[tuple[Draw, float], ...]] = (
    (person, 14),
    (city, 8),
    (noun, 22),
    (invented_word, 8),
    (colour, 6),
    (phrase, 8),
    (sentence, 6),
    (date, 4),
    (lambda rng: f"{date(rng)}T{clock_time(rng)}", 2),
    (clock_time, 2),
    (email, 3),
    (identifier, 5),
    (lambda rng: ".".join(str(rng.randrange(256)) for _ in range(4)), 1),
    (lambda rng: f"{invented_word(rng)}.{rng.choice(_DOMAINS)}", 1),
    (lambda rng: rng.choice((*DAYS, *MONTHS)), 2),
    (lambda rng: rng.choice("abcxyz"), 3),
    (lambda rng: rng.choice(_EMOJI), 1),
    (_noise, 5),
    (_noisy_words, 6),
)


def text(rng: random.Random) -> str:
    """Draw any short string."""
    draws, weights = zip(*_TEXTS, strict=True)
    drawn: str = rng.choices(draws, weights)[0](rng)
    return drawn


def integer(rng: random.Random) -> int:
    """Draw a whole number, mostly a small one."""
    magnitude = rng.randrange(10 ** rng.choices((1, 2, 3, 4, 6), (30, 40, 18, 9, 3))[0])
    return -magnitude if rng.random() < 0.08 else magnitude


def decimal(rng: random.Random) -> float:
    """Draw a number with one to three decimal places."""
    return round(integer(rng) + rng.random(), rng.randint(1, 3))


def scalar(rng: random.Random) -> Any:
    """Draw a value without parts."""
    draws: tuple[Draw, ...] = (
        text,
        integer,
        decimal,
        lambda _: True,
        lambda _: False,
        lambda _: None,
    )
    return rng.choices(draws, (45, 22, 14, 6, 6, 7))[0](rng)
