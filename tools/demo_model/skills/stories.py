"""Short stories from a grammar: a hero, and a place, a thing or a second animal.

A plot is a list of beats and a beat a list of sentences to choose from. Every slot of a sentence
({hero}, {name}, {he}, {thing}, ...) is bound once per story, so names and pronouns stay true to
the end. The same plots, read as patterns, let the evaluation check a written story.
"""

import random
import re
from typing import Final, NamedTuple

from tools.demo_model.exchange import Exchange
from tools.demo_model.skills.facts import WORDS
from tools.demo_model.skills.plots import ANIMAL_PLOTS, PLACE_PLOTS, THING_PLOTS, Plot
from tools.demo_model.skills.wording import capitalized, invented_word, listed, with_article

ANIMALS: Final = listed(
    "fox cat dog rabbit mouse bear wolf owl frog duck hedgehog squirrel lion tiger elephant "
    "unicorn parrot eagle cow hamster monkey turtle penguin deer goat horse pig sheep crow bee "
    "snail badger beaver hen goose rooster zebra giraffe panda kangaroo ant spider butterfly"
)
PEOPLE: Final = ("girl", "boy", "king", "queen", "princess", "prince", "farmer", "sailor",
                 "wizard", "witch", "robot", "dragon", "giant", "baker", "knight", "pirate",
                 "fairy", "man", "woman")  # fmt: skip
PLACES: Final = listed(
    "river forest mountain lake garden cave island village castle meadow beach hill "
    "sea ocean town school library market bridge farm desert tower valley pond mill well"
)
THINGS: Final = listed(
    "lantern kite boat key drum bell book map hat apple ball coin ring umbrella "
    "candle spoon sword crown rocket train pie cake flute basket mirror clock balloon cookie "
    "pumpkin star"
)
_NAMES: Final = {
    "he": listed("Ben Max Oliver Jack Leo Finn Oscar Felix Hugo Theo Rufus Otto"),
    "she": listed("Lily Ruby Rosie Daisy Mia Nora Ella Clara Ivy Luna Poppy Tilly"),
}
_FEMALE: Final = frozenset(("girl", "queen", "princess", "witch", "fairy", "woman", "cow", "hen"))
_MALE: Final = frozenset(("boy", "king", "prince", "wizard", "man", "rooster"))
_ADJECTIVES: Final = ("little", "brave", "clever", "kind", "curious", "lonely", "happy", "shy")
_POSSESSIVE: Final = {"he": "his", "she": "her"}
_OBJECTIVE: Final = {"he": "him", "she": "her"}
_FRIENDS: Final = ("bird", "mouse", "frog", "kitten", "rabbit", "duck", "lamb", "puppy")

_ABOUT: Final = (
    "Tell me a story about {a} and {b}.",
    "Tell me a story about {a} and {b}.",
    "Tell me a short story about {a} and {b}.",
    "Please tell me a story about {a} and {b}.",
    "Can you tell me a story about {a} and {b}?",
    "Write a story about {a} and {b}.",
    "Write a short story about {a} and {b}.",
    "I want to hear a story about {a} and {b}.",
    "Make up a story about {a} and {b}.",
    "Tell me a story with {a} and {b} in it.",
    "Could you write a little story about {a} and {b}?",
    "A story about {a} and {b}, please.",
    "Do you know a story about {a} and {b}?",
    "Tell a story about {a} and {b}.",
)
_ABOUT_ONE: Final = (
    "Tell me a story about {a}.", "Write a short story about {a}.",
    "Can you tell me a story about {a}?", "Please tell me a short story about {a}.",
    "I want to hear a story about {a}.", "Do you know a story about {a}?",
)  # fmt: skip
_ANY: Final = (
    "Tell me a story.", "Tell me a short story.", "Write a story.", "Can you tell me a story?",
    "I want to hear a story.", "Please tell me a story.", "Another story, please.", "Story time!",
)  # fmt: skip


class Subject(NamedTuple):
    """The subject of a story; `second` is a place, a thing or another animal."""

    hero: str
    second: str


def _plots_for(second: str) -> tuple[Plot, ...]:
    if second in PLACES:
        return PLACE_PLOTS
    return ANIMAL_PLOTS if second in (*ANIMALS, *PEOPLE) else THING_PLOTS


def draw_subject(rng: random.Random) -> Subject:
    """Choose a hero and a second subject."""
    hero = rng.choice(ANIMALS if rng.random() < 0.7 else PEOPLE)
    kind = rng.choice((PLACES, PLACES, THINGS, THINGS, ANIMALS, ANIMALS, PEOPLE))
    second = rng.choice([word for word in kind if word != hero])
    # The model is to copy what it is asked for, not to know every noun there is.
    if rng.random() < 0.06:
        hero = invented_word(rng)
    if kind == THINGS and rng.random() < 0.25:
        second = rng.choice((rng.choice(WORDS), invented_word(rng)))
    return draw_subject(rng) if hero == second else Subject(hero, second)


def tell(rng: random.Random, subject: Subject) -> str:
    """Write a story about the subject."""
    hero, second = subject
    pronoun = rng.choice(("he", "she"))
    if hero in _FEMALE:
        pronoun = "she"
    elif hero in _MALE:
        pronoun = "he"
    friend = rng.choice([word for word in _FRIENDS if word not in subject])
    name = rng.choice(_NAMES[pronoun])
    slots = _slots(subject, pronoun, friend, name, with_article(rng.choice(_ADJECTIVES)))
    return " ".join(rng.choice(beat).format_map(slots) for beat in rng.choice(_plots_for(second)))


def _slots(
    subject: Subject, pronoun: str, friend: str, name: str, adjective: str
) -> dict[str, str]:
    return {
        "hero": subject.hero,
        "second": subject.second,
        "a_second": with_article(subject.second),
        "a_adj": adjective,
        "friend": friend,
        "name": name,
        "Name": name,
        "he": pronoun,
        "He": capitalized(pronoun),
        "his": _POSSESSIVE[pronoun],
        "him": _OBJECTIVE[pronoun],
    }


def is_told_well(story: str, subject: Subject) -> bool:
    """Return whether some plot can produce this story about the subject.

    Names, pronouns and the friend must be the same from the first sentence to the last.
    """
    start = re.search(r"was (an? \w+) \w+ (?:named|called) (\w+)\.|lived (an? \w+) \w+ named (\w+)",
                      story)  # fmt: skip
    if start is None:
        return False
    adjective, name = start[1] or start[3], start[2] or start[4]
    pronoun = "he" if name in _NAMES["he"] else "she"
    return any(
        _follows(story, plot, _slots(subject, pronoun, friend, name, adjective))
        for plot in _plots_for(subject.second)
        for friend in _FRIENDS
    )


def answers_request(story: str, request: str) -> bool:
    """Return whether the story is well told and about what the request asks for."""
    wanted = set(re.findall(r"\ban? (\w+)", request)) - {"story", "short", "little"}
    heroes = {*ANIMALS, *PEOPLE, *wanted}
    seconds = {*PLACES, *THINGS, *heroes}
    return any(
        wanted <= {hero, second} and is_told_well(story, Subject(hero, second))
        for hero in heroes
        for second in seconds
        if hero != second and hero in story and second in story
    )


def _follows(story: str, plot: Plot, slots: dict[str, str]) -> bool:
    """Return whether the story is a choice of one sentence per beat, in order."""
    for beat in plot:
        sentences = (sentence.format_map(slots) for sentence in beat)
        begun = next((s for s in sentences if story.startswith(s)), None)
        if begun is None:
            return False
        story = story[len(begun) :].lstrip()
    return not story


def story(rng: random.Random) -> Exchange:
    """Ask for a story about two things, about one, or about anything."""
    subject = draw_subject(rng)
    draw = rng.random()
    forms = _ABOUT if draw < 0.8 else _ABOUT_ONE if draw < 0.92 else _ANY
    first, second = subject
    if second in (*PLACES, *THINGS) and rng.random() < 0.15:
        first, second = second, first  # "about a river and a fox", or about a river alone
    question = rng.choice(forms).format(a=with_article(first), b=with_article(second))
    return Exchange("story", question, tell(rng, subject), key=f"{subject.hero},{subject.second}")
