"""Questions with a definite answer: about one fact, about a list, or about the previous fact."""

import random
from dataclasses import replace
from typing import Final

from tools.demo_model.exchange import Exchange, Skill, draw
from tools.demo_model.skills import facts
from tools.demo_model.skills.relations import RELATIONS
from tools.demo_model.skills.wording import capitalized

_LISTS: Final = (
    ("days", "the days of the week", ", ".join(facts.DAYS)),
    ("months", "the months of the year", ", ".join(facts.MONTHS)),
    ("alphabet", "the letters of the alphabet", ", ".join(facts.ALPHABET)),
)
_SINGLE_FRAMES: Final = (
    "{q}", "{q}", "{q}", "Tell me: {q}", "Quick question: {q}", "Do you know? {q}",
    "I have a question. {q}", "Please tell me. {q}",
)  # fmt: skip


def ordered_list(rng: random.Random) -> Exchange:
    """Ask for all days, months or letters in order."""
    skill, title, names = rng.choice(_LISTS)
    form = rng.choice(
        ("What are {t}?", "List {t}.", "Name {t}.", "Tell me {t}.", "Can you list {t}?", "Say {t}.")
    )
    question = form.format(t=title)
    return Exchange(skill, question, f"{capitalized(title)} are {names}.", key=question)


def single_fact(rng: random.Random) -> Exchange:
    """Ask for a fact that belongs to no table."""
    question, answer = rng.choice(facts.SINGLE)
    asked = rng.choice(_SINGLE_FRAMES).format(q=question)
    return Exchange("general", asked, answer, key="" if asked == question else asked)


def follow_up(rng: random.Random) -> tuple[Exchange, Exchange]:
    """Ask about one fact, and then about another with no more than "And ...?"."""
    relation = rng.choice([relation for relation in RELATIONS if len(relation.facts) > 20])
    first = draw(relation, rng)
    x, y = rng.choice(relation.facts)
    noun = "{a_x}" if "{a_x}" in relation.questions[0] else "{x}"
    wording = rng.choice(("And {n}?", "And what about {n}?", "What about {n}?", "Now {n}."))
    second = relation.ask(wording.replace("{n}", noun), x, y)
    return first, replace(second, skill="follow-up", key=first.question + second.question)


SKILLS: Final[tuple[Skill, ...]] = (*RELATIONS, ordered_list, single_fact)
