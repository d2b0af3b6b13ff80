"""Stories: about what was asked for, and true to their names to the end."""

import random

import pytest

from tools.demo_model.skills import stories
from tools.demo_model.skills.stories import Subject

FOX_AND_RIVER = Subject("fox", "river")


def test_every_story_is_one_that_the_grammar_can_read_back():
    rng = random.Random(1)
    for _ in range(500):
        subject = stories.draw_subject(rng)
        assert stories.is_told_well(stories.tell(rng, subject), subject)


def test_every_story_answers_its_request():
    rng = random.Random(2)
    for _ in range(20):
        exchange = stories.story(rng)
        assert stories.answers_request(exchange.answer, exchange.question)


def test_a_story_has_a_few_sentences_and_no_open_slots():
    rng = random.Random(3)
    for _ in range(200):
        text = stories.tell(rng, stories.draw_subject(rng))
        assert text.count(".") >= 5
        assert 50 <= len(text.split()) <= 130
        assert "{" not in text


@pytest.mark.parametrize("damage", [("fox", "cat"), ("river", "cave"), (".", ""), (" the ", " ")])
def test_a_damaged_story_is_noticed(damage):
    text = stories.tell(random.Random(4), FOX_AND_RIVER)
    assert stories.is_told_well(text, FOX_AND_RIVER)
    assert not stories.is_told_well(text.replace(*damage), FOX_AND_RIVER)


def test_a_story_about_something_else_is_no_answer():
    text = stories.tell(random.Random(5), FOX_AND_RIVER)
    assert stories.answers_request(text, "Tell me a story about a fox.")
    assert not stories.answers_request(text, "Tell me a story about a fox and a cave.")


def test_a_queen_is_she_and_a_king_is_he():
    rng = random.Random(6)
    for _ in range(30):
        assert " he " not in stories.tell(rng, Subject("queen", "cave"))
        assert " she " not in stories.tell(rng, Subject("king", "cave"))
