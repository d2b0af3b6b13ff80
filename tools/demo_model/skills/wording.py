"""Small pieces of English that all parts of the corpus use."""

import random
from collections.abc import Sequence
from typing import Final

_ONSETS: Final = ("b", "bl", "br", "c", "ch", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "l",
                  "m", "n", "p", "pl", "qu", "r", "s", "sh", "sp", "st", "t", "tr", "v", "w",
                  "wh", "z")  # fmt: skip
_VOWELS: Final = ("a", "a", "e", "e", "i", "o", "o", "u", "ai", "ea", "oo")
_CODAS: Final = ("", "b", "ck", "d", "l", "m", "n", "ng", "nia", "p", "r", "rus", "s", "t", "x")


def listed(text: str) -> tuple[str, ...]:
    """Return the words of a text; a table of a hundred words reads better without quotes."""
    return tuple(text.split())


def enumerated(parts: Sequence[str]) -> str:
    """Return "a, b and c"."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def with_article(noun: str) -> str:
    """Return the noun with "a" or "an" before it."""
    return f"{'an' if noun[0].lower() in 'aeiou' else 'a'} {noun}"


def capitalized(text: str) -> str:
    """Return the text with its first letter in upper case and the rest left alone."""
    return text[:1].upper() + text[1:]


def invented_word(rng: random.Random) -> str:
    """Return a made-up word, about which nothing can be memorized."""
    syllables = rng.choices((1, 2, 3), (3, 6, 1))[0]
    word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables))
    return word + rng.choice(_CODAS)
