"""The training text: conversations and plain text, generated only from a seed.

Questions are drawn from the skills with the weights below, and joined to conversations of one or
more turns, sometimes with a system message. Some conversations are answered in JSON, some offer
functions to call. Some documents are plain text without markup, for plain completions.
"""

import random
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Final

from tools.demo_model.conversation import Conversation, Document, Message, PlainText
from tools.demo_model.exchange import Exchange, Skill, draw, draw_pair
from tools.demo_model.skills import (
    arithmetic,
    json_answers,
    questions,
    smalltalk,
    stories,
    tool_calls,
    words,
)
from tools.demo_model.skills.relations import Relation


def _any_question(rng: random.Random) -> Exchange:
    """Draw from the tables of facts, large tables more often than small ones."""
    return rng.choices(questions.SKILLS, _QUESTION_WEIGHTS)[0](rng)


_QUESTION_WEIGHTS: Final = tuple(
    max(len(skill.facts), 15) if isinstance(skill, Relation) else 25 for skill in questions.SKILLS
)

SKILL_WEIGHTS: Final[tuple[tuple[Skill, float], ...]] = (
    (arithmetic.addition, 20),
    (arithmetic.subtraction, 24),
    (arithmetic.times_table, 6),
    (arithmetic.division, 4),
    (arithmetic.word_problem, 4),
    (arithmetic.comparison, 5),
    (arithmetic.parity, 1),
    (_any_question, 36),
    (words.spelling, 2),
    (words.reversing, 2),
    (words.length, 1.5),
    (words.first_or_last, 1.5),
    (stories.story, 12),
    (smalltalk.small_talk, 4),
    (smalltalk.beyond_reach, 1),
    (smalltalk.nonsense, 0.8),
    (smalltalk.too_large, 0.7),
    (smalltalk.unknown_name, 0.3),
)
_SKILLS: Final = tuple(skill for skill, _ in SKILL_WEIGHTS)
_WEIGHTS: Final = tuple(weight for _, weight in SKILL_WEIGHTS)

BRIEF: Final = (
    "Answer briefly.", "Be brief.", "Answer in one word.", "Give only the answer.",
    "Answer with one word or number.", "Keep it short: answer in one word.",
    "You are a helpful assistant. Answer in one word.", "Reply with the answer only.",
)  # fmt: skip
_HELPFUL: Final = (
    "You are a helpful assistant.", "You are a helpful assistant.",
    "You are the pdserve demo model.", "You are a friendly assistant.", "You are a kind teacher.",
    "Answer the questions of the user.", "You help children to learn.",
)  # fmt: skip
_RULES: Final = tuple(
    f"{subject} {verb} {rest}."
    for subject in ("The assistant", "You", "A good helper", "Our house", "This service")
    for verb in ("should keep", "must remember", "will follow", "may mention", "never forgets")
    for rest in (
        "the rules of the library", "to be polite to every guest", "that the answer is clear",
        "the opening hours of the shop", "what the user has asked before", "a calm and warm voice",
        "the garden and the river", "to check the sum twice", "the names of all the cats",
    )
)  # fmt: skip


_TURNS: Final = (1, 2, 3, 5, 8)
_TURN_WEIGHTS: Final = (60, 20, 12, 6, 2)


def draw_exchange(rng: random.Random) -> Exchange:
    """Draw one exchange that is not held out, any skill."""
    return draw(rng.choices(_SKILLS, _WEIGHTS)[0], rng)


def roughened(rng: random.Random, question: str) -> str:
    """Return the question as a user in a hurry might type it."""
    if rng.random() < 0.1:
        question = question[0].lower() + question[1:]
    if rng.random() < 0.12:
        question = question.rstrip("?.!")
    if rng.random() < 0.03:
        question = question.lower()
    return question


def _system_message(rng: random.Random) -> str:
    """Return a system message without effect on the answer, sometimes a long list of rules."""
    if rng.random() < 0.8:
        return rng.choice(_HELPFUL)
    rules = rng.sample(_RULES, rng.randrange(1, 25))
    return " ".join([rng.choice(_HELPFUL), *rules])


def _exchanges(rng: random.Random) -> list[Exchange]:
    """Draw the turns of one conversation; some look back at an earlier turn."""
    exchanges = [draw_exchange(rng) for _ in range(rng.choices(_TURNS, _TURN_WEIGHTS)[0])]
    kind = rng.random()
    if kind < 0.06:
        told, asked = smalltalk.introduction(rng)
        return [told, *exchanges[rng.randrange(len(exchanges) + 1) :], asked]
    if kind < 0.12:
        return [*exchanges[1:], *draw_pair(questions.follow_up, rng)]
    return exchanges


def dialogue(
    exchanges: Iterable[Exchange], system: str = "", *, is_brief: bool = False
) -> Conversation:
    """Lay the exchanges out as messages."""
    messages = [Message("system", system)] if system else []
    for exchange in exchanges:
        answer = exchange.brief if is_brief and exchange.brief else exchange.answer
        messages.append(Message("user", exchange.question))
        messages.append(Message("assistant", answer))
    return Conversation(tuple(messages))


def conversation(rng: random.Random) -> Conversation:
    """Draw a conversation of one or more turns."""
    exchanges = [replace(e, question=roughened(rng, e.question)) for e in _exchanges(rng)]
    if rng.random() < 0.14:
        return dialogue(exchanges, rng.choice(BRIEF), is_brief=True)
    return dialogue(exchanges, _system_message(rng) if rng.random() < 0.2 else "")


def plain_text(rng: random.Random) -> PlainText:
    """Draw a story, a few statements, or questions with answers, without any markup."""
    kind = rng.random()
    if kind < 0.3:
        return PlainText(draw(stories.story, rng).answer)
    facts = [draw_exchange(rng) for _ in range(rng.randrange(1, 4))]
    facts = [fact for fact in facts if fact.skill != "story"] or [draw(questions.single_fact, rng)]
    if kind < 0.7:
        return PlainText(" ".join(fact.answer for fact in facts))
    lines = [f"Question: {fact.question}\nAnswer: {fact.answer}" for fact in facts]
    return PlainText("\n\n".join(lines))


def document(rng: random.Random) -> Document:
    """Draw any document."""
    kind = rng.random()
    if kind < 0.08:
        return plain_text(rng)
    if kind < 0.71:
        return conversation(rng)
    if kind < 0.82:
        return json_answers.forced(rng, draw_exchange)
    if kind < 0.90:
        return json_answers.requested(rng, draw_exchange)
    return tool_calls.conversation(rng, draw_exchange)


def documents(seed: int) -> Iterator[Document]:
    """Yield documents without end, the same ones for the same seed."""
    rng = random.Random(seed)
    while True:
        yield document(rng)
