"""Tasks on the letters of short words: spelling, reversing, counting.

The tokenizer hides the letters of a common word behind one token. So the answers spell the word
first, which gives the model the letters to work on, and the reader something to check.
"""

import random
from typing import Final

from tools.demo_model.exchange import Exchange
from tools.demo_model.skills.facts import WORDS
from tools.demo_model.skills.wording import capitalized

_SPELL: Final = (
    "Spell {w}.", "Spell the word {w}.", "How do you spell {w}?", 'How do you spell "{w}"?',
    "Can you spell {w}?", "Please spell the word {w}.",
)  # fmt: skip
_REVERSE: Final = (
    "Reverse {w}.", "Reverse the word {w}.", "Spell {w} backwards.", "What is {w} backwards?",
    "Write {w} backwards.", "Can you reverse the word {w}?", 'What is "{w}" spelled backwards?',
)  # fmt: skip
_LENGTH: Final = (
    "How many letters are in {w}?", "How many letters are in the word {w}?",
    "How many letters does {w} have?", "How long is the word {w}?", "Count the letters in {w}.",
)  # fmt: skip
_ENDS: Final = (
    "What is the {e} letter of {w}?", "Which letter is the {e} letter of {w}?",
    "What is the {e} letter of the word {w}?", "What letter does {w} {v} with?",
)  # fmt: skip
_COUNT: Final = (
    "How many times does the letter {c} appear in {w}?", "How many {c}'s are in {w}?",
    "How many {c}s are in {w}?", "How many {c}'s are there in the word {w}?",
    "How many times is the letter {c} in {w}?", "Count the letter {c} in {w}.",
)  # fmt: skip


def _spelled(word: str) -> str:
    return " ".join(word)


def spelling(rng: random.Random) -> Exchange:
    """Ask to spell a word."""
    word = rng.choice(WORDS)
    answer = f"{capitalized(word)} is spelled {_spelled(word)}."
    question = rng.choice(_SPELL).format(w=word)
    return Exchange("spelling", question, answer, _spelled(word), key=question)


def reversing(rng: random.Random) -> Exchange:
    """Ask to write a word backwards."""
    word = rng.choice(WORDS)
    back = word[::-1]
    answer = f"{capitalized(word)} is {_spelled(word)}, and backwards it is {_spelled(back)}."
    question = rng.choice(_REVERSE).format(w=word)
    return Exchange("reversing", question, answer, _spelled(back), key=question)


def length(rng: random.Random) -> Exchange:
    """Ask how many letters a word has."""
    word = rng.choice(WORDS)
    answer = f"{capitalized(word)} is {_spelled(word)}: it has {len(word)} letters."
    question = rng.choice(_LENGTH).format(w=word)
    return Exchange("letters", question, answer, str(len(word)), key=question)


def first_or_last(rng: random.Random) -> Exchange:
    """Ask for the first or last letter of a word."""
    word = rng.choice(WORDS)
    end, verb, letter = rng.choice((("first", "begin", word[0]), ("last", "end", word[-1])))
    question = rng.choice(_ENDS).format(e=end, v=verb, w=word)
    answer = f"{capitalized(word)} is {_spelled(word)}: the {end} letter is {letter}."
    return Exchange("letters", question, answer, letter, key=question)
