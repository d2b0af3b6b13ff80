"""The tables of facts as questions: many ways to ask, one way to answer."""

import random
from dataclasses import dataclass
from typing import Final

from tools.demo_model.exchange import Exchange
from tools.demo_model.skills import facts
from tools.demo_model.skills.wording import capitalized, with_article


@dataclass(frozen=True)
class Relation:
    """One table of facts x |-> y with its wordings.

    Wordings may use {x}, {y}, {a_x}, {a_y} ("an owl") and begin with a capital once filled in.
    """

    skill: str
    facts: facts.Facts
    questions: tuple[str, ...]
    answer: str
    brief: str = "{y}"

    def __call__(self, rng: random.Random) -> Exchange:
        """Ask about one fact in one wording."""
        x, y = rng.choice(self.facts)
        return self.ask(rng.choice(self.questions), x, y)

    def ask(self, wording: str, x: str, y: str) -> Exchange:
        """Fill one wording and the answer with one fact."""
        slots = {"x": x, "y": y, "a_x": with_article(x), "a_y": with_article(y)}
        question, answer, brief = (
            capitalized(text.format(**slots)) for text in (wording, self.answer, self.brief)
        )
        return Exchange(self.skill, question, answer.replace("..", "."), brief, key=question)


def _inverse(table: facts.Facts) -> facts.Facts:
    return tuple((y, x) for x, y in table)


def _neighbours(names: tuple[str, ...], step: int) -> facts.Facts:
    """Map each name to the one `step` places on, going round at the end."""
    return tuple((name, names[(i + step) % len(names)]) for i, name in enumerate(names))


_NEXT: Final = (
    "What {kind} comes after {{x}}?",
    "Which {kind} comes after {{x}}?",
    "What is the {kind} after {{x}}?",
    "Which {kind} follows {{x}}?",
    "What comes after {{x}}?",
)
_PREVIOUS: Final = (
    "What {kind} comes before {{x}}?",
    "Which {kind} comes before {{x}}?",
    "What is the {kind} before {{x}}?",
    "What comes before {{x}}?",
)


def _order(kind: str, names: tuple[str, ...]) -> tuple[Relation, Relation]:
    """Return the relations "after" and "before" over a cycle of names."""
    skill = {"day": "days", "month": "months", "letter": "alphabet"}[kind]
    after = tuple(wording.format(kind=kind) for wording in _NEXT)
    before = tuple(wording.format(kind=kind) for wording in _PREVIOUS)
    forward, backward = _neighbours(names, 1), _neighbours(names, -1)
    if kind == "letter":
        forward, backward = forward[:-1], backward[1:]
    return (
        Relation(skill, forward, after, "{y} comes after {x}."),
        Relation(skill, backward, before, "{y} comes before {x}."),
    )


_TRANSLATE: Final = (
    "How do you say {{x}} in {language}?",
    'How do you say "{{x}}" in {language}?',
    "What is {{x}} in {language}?",
    "What is the {language} word for {{x}}?",
    "Translate {{x}} into {language}.",
    "Translate {{x}} to {language}.",
)


def _translation(language: str, table: facts.Facts) -> Relation:
    questions = tuple(wording.format(language=language) for wording in _TRANSLATE)
    answer = f"The {language} word for {{x}} is {{y}}."
    return Relation("translation", table, questions, answer)


RELATIONS: Final = (
    Relation(
        "capitals",
        facts.CAPITALS,
        (
            "What is the capital of {x}?",
            "What is the capital city of {x}?",
            "What's the capital of {x}?",
            "Which city is the capital of {x}?",
            "Name the capital of {x}.",
            "Tell me the capital of {x}.",
            "Do you know the capital of {x}?",
            "Can you tell me the capital of {x}?",
            "Capital of {x}?",
            "I forgot the capital of {x}. What is it?",
        ),
        "The capital of {x} is {y}.",
    ),
    Relation(
        "capitals",
        _inverse(facts.CAPITALS),
        (
            "{x} is the capital of which country?",
            "Which country has the capital {x}?",
            "What country is {x} the capital of?",
            "Of which country is {x} the capital?",
        ),
        "{x} is the capital of {y}.",
    ),
    Relation(
        "continents",
        facts.CONTINENTS,
        (
            "Which continent is {x} in?",
            "What continent is {x} in?",
            "On which continent is {x}?",
            "Where is {x}?",
            "Where in the world is {x}?",
        ),
        "{x} is in {y}.",
    ),
    Relation(
        "opposites",
        facts.OPPOSITES,
        (
            "What is the opposite of {x}?",
            'What is the opposite of "{x}"?',
            "What's the opposite of {x}?",
            "Tell me the opposite of {x}.",
            "Give me the opposite of {x}.",
            "Which word means the opposite of {x}?",
            "Name the opposite of {x}.",
            "Opposite of {x}?",
        ),
        "The opposite of {x} is {y}.",
    ),
    Relation(
        "colours",
        facts.COLOURS,
        (
            "What colour is {x}?",
            "What color is {x}?",
            "Which colour is {x}?",
            "Tell me the colour of {x}.",
            "What is the colour of {x}?",
            "What is the color of {x}?",
            "Do you know what colour {x} is?",
        ),
        "{x} is {y}.",
    ),
    Relation(
        "animal sounds",
        facts.SOUNDS,
        (
            "What sound does {a_x} make?",
            "What noise does {a_x} make?",
            "Which sound does {a_x} make?",
            "What does {a_x} say?",
            "What does the {x} say?",
            "How does {a_x} sound?",
            "Make the sound of {a_x}.",
        ),
        "{a_x} says {y}.",
    ),
    Relation(
        "young animals",
        facts.YOUNG,
        (
            "What is a baby {x} called?",
            "What do you call a baby {x}?",
            "What is the name for a young {x}?",
            "What do you call a young {x}?",
        ),
        "A baby {x} is called {a_y}.",
    ),
    Relation(
        "animal homes",
        facts.HOMES,
        ("Where does {a_x} live?", "What is the home of {a_x}?", "Where do you find {a_x}?"),
        "{a_x} lives in {a_y}.",
    ),
    Relation(
        "legs",
        facts.LEGS,
        (
            "How many legs does {a_x} have?",
            "How many legs are on {a_x}?",
            "Tell me how many legs {a_x} has.",
        ),
        "{a_x} has {y} legs.",
    ),
    Relation(
        "plurals",
        facts.PLURALS,
        (
            "What is the plural of {x}?",
            "What's the plural of {x}?",
            "Tell me the plural of {x}.",
            "One {x}, two what?",
        ),
        "The plural of {x} is {y}.",
    ),
    Relation(
        "past tense",
        facts.PAST,
        (
            "What is the past tense of {x}?",
            "What is the past of {x}?",
            "Tell me the past tense of {x}.",
            "Put {x} into the past tense.",
        ),
        "The past tense of {x} is {y}.",
    ),
    *_order("day", facts.DAYS),
    *_order("month", facts.MONTHS),
    *_order("letter", tuple(facts.ALPHABET)),
    Relation(
        "days",
        tuple(zip(facts.ORDINALS, facts.DAYS, strict=False)),
        ("What is the {x} day of the week?", "Which day is the {x} day of the week?"),
        "The {x} day of the week is {y}.",
    ),
    Relation(
        "months",
        tuple(zip(facts.ORDINALS, facts.MONTHS, strict=True)),
        ("What is the {x} month of the year?", "Which month is the {x} month of the year?"),
        "The {x} month of the year is {y}.",
    ),
    Relation(
        "months",
        tuple(zip(facts.MONTHS, map(str, facts.MONTH_LENGTHS), strict=True)),
        (
            "How many days does {x} have?",
            "How many days are in {x}?",
            "How many days are there in {x}?",
        ),
        "{x} has {y} days.",
    ),
    _translation("French", facts.FRENCH),
    _translation("Spanish", facts.SPANISH),
    _translation("German", facts.GERMAN),
    Relation(
        "emoji",
        facts.EMOJI,
        ("Show me {a_x} emoji.", "What is the emoji for {x}?", "Send me {a_x} emoji."),
        "Here is {a_x}: {y}",
    ),
)
