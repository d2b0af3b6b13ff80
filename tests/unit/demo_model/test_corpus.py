"""The generated text: the same for the same seed, right in what it says, honestly split."""

import itertools
import random
import re
import subprocess
import sys

import pytest

from tools.demo_model import corpus
from tools.demo_model.exchange import Exchange, draw, draw_pair, is_held_out
from tools.demo_model.skills import arithmetic, facts, questions, smalltalk, words
from tools.demo_model.skills.relations import RELATIONS

NUMBERS = re.compile(r"\d+")


def sample(skill, count=500, *, held_out=False) -> list[Exchange]:
    rng = random.Random(7)
    return [draw(skill, rng, held_out=held_out) for _ in range(count)]


def numbers(text: str) -> list[int]:
    return [int(number) for number in NUMBERS.findall(text)]


def test_the_package_itself_loads_neither_torch_nor_transformers():
    code = (
        "import sys, pdserve.demo_model as m;"
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules);"
        "assert m.CHECKPOINT_PATH.name == 'checkpoint'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_same_seed_gives_the_same_documents():
    def start(seed: int) -> list[corpus.Document]:
        return list(itertools.islice(corpus.documents(seed), 300))

    assert start(1) == start(1)
    assert start(1) != start(2)


def test_conversations_end_with_an_answer_to_somebody():
    for document in itertools.islice(corpus.documents(3), 500):
        if isinstance(document, corpus.PlainText):
            assert document.text
            continue
        roles = "".join(message.role[0] for message in document.messages)
        # Tools and instructions first; behind a call there may be several results.
        assert re.fullmatch("s{0,2}(u+a)+", roles), roles
        assert all(message.text for message in document.messages)


@pytest.mark.parametrize(
    ("skill", "result"),
    [
        (arithmetic.addition, lambda a, b: a + b),
        (arithmetic.subtraction, lambda a, b: a - b),
        (arithmetic.times_table, lambda a, b: a * b),
        (arithmetic.division, lambda a, b: a // b),
    ],
)
def test_sums_are_right(skill, result):
    for exchange in sample(skill):
        a, b = numbers(exchange.question)
        shown = re.fullmatch(r"(\d+) [-+×÷] (\d+) = (-?\d+)\.", exchange.answer)
        assert shown is not None
        assert [int(number) for number in shown.groups()] == [a, b, result(a, b)]


def test_word_problems_are_right():
    for exchange in sample(arithmetic.word_problem):
        a, b = numbers(exchange.question)
        gains = re.search(r"more|in all", exchange.question)
        assert numbers(exchange.answer) == [a, b, a + b if gains else a - b]


def test_comparison_and_parity_are_right():
    for exchange in sample(arithmetic.comparison):
        wanted = min if "smaller" in exchange.question else max
        assert exchange.brief == str(wanted(numbers(exchange.question)))
    for exchange in sample(arithmetic.parity):
        assert (numbers(exchange.answer)[0] % 2 == 0) == ("even" in exchange.answer)


def test_letters_are_right():
    for exchange in sample(words.reversing):
        word = exchange.answer.split()[0].lower()
        assert exchange.brief == " ".join(reversed(word))
    for exchange in sample(words.length):
        assert numbers(exchange.answer) == [len(exchange.answer.split()[0])]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("What is the capital of France?", "The capital of France is Paris."),
        ("Rome is the capital of which country?", "Rome is the capital of Italy."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("What colour is the sky?", "The sky is blue."),
        ("What sound does an owl make?", "An owl says hoot."),
        ("What day comes after Sunday?", "Monday comes after Sunday."),
        ("What month comes before January?", "December comes before January."),
        ("How many days are in February?", "February has 28 days."),
        ("How do you say school in French?", "The French word for school is école."),
        ("How many legs does a spider have?", "A spider has 8 legs."),
    ],
)
def test_facts_are_asked_and_answered_in_english(question, answer):
    asked = {
        exchange.question: exchange.answer
        for relation in RELATIONS
        for x, y in relation.facts
        for exchange in (relation.ask(wording, x, y) for wording in relation.questions)
    }
    assert asked[question] == answer


def test_no_question_has_two_answers():
    answers: dict[str, str] = {}
    for relation in RELATIONS:
        for x, y in relation.facts:
            for wording in relation.questions:
                exchange = relation.ask(wording, x, y)
                assert answers.setdefault(exchange.question, exchange.answer) == exchange.answer


def test_every_fact_is_trained_in_some_wording():
    for relation in RELATIONS:
        for x, y in relation.facts:
            asked = [relation.ask(wording, x, y) for wording in relation.questions]
            assert not all(is_held_out(exchange) for exchange in asked)


def test_tables_have_no_empty_entries():
    assert all(x and y for relation in RELATIONS for x, y in relation.facts)
    assert all(q.endswith("?") and a.endswith(".") for q, a in facts.SINGLE)


def test_held_out_sums_never_occur_in_training_in_either_order():
    trained = {exchange.key for exchange in sample(arithmetic.addition, 20_000)}
    asked = {exchange.key for exchange in sample(arithmetic.addition, held_out=True)}
    assert asked.isdisjoint(trained)
    for exchange in sample(arithmetic.addition):
        assert exchange.key == ",".join(map(str, sorted(numbers(exchange.question))))


def test_held_out_questions_never_occur_in_the_training_stream():
    asked = {
        exchange.question
        for skill in (*questions.SKILLS, arithmetic.word_problem, words.reversing)
        if skill is not questions.ordered_list
        for exchange in sample(skill, 20, held_out=True)
    }
    rng = random.Random(11)
    trained = {corpus.draw_exchange(rng).question for _ in range(10_000)}
    assert asked.isdisjoint(trained)


def test_a_pair_is_split_by_its_second_question():
    rng = random.Random(5)
    for held_out in (False, True):
        first, second = draw_pair(questions.follow_up, rng, held_out=held_out)
        assert not is_held_out(first)
        assert is_held_out(second) == held_out


def test_small_talk_is_never_held_out():
    assert not any(is_held_out(exchange) for exchange in sample(smalltalk.small_talk))


def test_a_brief_system_message_shortens_the_answer():
    capital = Exchange("capitals", "What is the capital of France?", "It is Paris.", "Paris")
    messages = corpus.dialogue([capital], corpus.BRIEF[0], is_brief=True).messages
    assert [message.role for message in messages] == ["system", "user", "assistant"]
    assert messages[-1].text == "Paris"
