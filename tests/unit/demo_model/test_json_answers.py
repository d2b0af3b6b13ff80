"""Conversations in JSON: every answer is JSON, short, and holds what was asked for."""

import itertools
import json
import random
import re

import jsonschema
import pytest

from tools.demo_model import corpus
from tools.demo_model.conversation import Conversation
from tools.demo_model.exchange import Exchange, draw
from tools.demo_model.skills import extraction, json_answers, json_fields, questions
from tools.demo_model.skills.json_schemas import Field, object_schema, schema_text

SUM = Exchange("addition", "What is 7 + 5?", "7 + 5 = 12.")
FRANCE = Exchange("capitals", "What is the capital of France?", "It is Paris.", "Paris")
SHEEP = Exchange("comparison", "Which is smaller, -3 or 2?", "-3 is smaller than 2.", "-3")
STORY = Exchange("story", "Tell me a story.", "Once there was a fox.")


def answer_of(conversation: Conversation) -> str:
    assert [message.role for message in conversation.messages][-2:] == ["user", "assistant"]
    return conversation.messages[-1].text


@pytest.mark.parametrize(
    ("exchange", "result"), [(SUM, 12), (FRANCE, "Paris"), (SHEEP, -3), (STORY, None)]
)
def test_the_bare_answer_is_a_number_where_it_is_one(exchange, result):
    assert json_answers.result_of(exchange) == result


def test_a_request_without_names_is_answered_under_answer():
    rng = random.Random(1)
    for exchange, expected in ((SUM, 12), (FRANCE, "Paris"), (STORY, STORY.answer)):
        answer = answer_of(json_answers.plain_request(rng, exchange))
        assert json.loads(answer) == {"answer": expected}


def test_a_described_request_gets_the_properties_it_names_and_the_result_first():
    rng = random.Random(2)
    for _ in range(200):
        conversation = json_answers.described_request(rng, FRANCE)
        answer = json.loads(answer_of(conversation))
        asked = " ".join(message.text for message in conversation.messages[:-1])
        assert next(iter(answer.values())) == "Paris"
        assert all(name in asked for name in answer)


def test_an_extraction_repeats_what_was_told():
    rng = random.Random(3)
    for _ in range(200):
        told, fields = extraction.draw_statement(rng)
        assert all(str(field.value) in told for field in fields)
        assert len({field.name for field in fields}) == len(fields)


def test_an_extraction_is_held_out_by_its_sentence():
    trained = {extraction.draw_statement(random.Random(i))[0] for i in range(500)}
    asked = {extraction.draw_statement(random.Random(i), held_out=True)[0] for i in range(500)}
    assert asked.isdisjoint(trained)


def test_values_are_instances_of_their_schemas():
    rng = random.Random(4)
    for _ in range(300):
        fields = json_fields.any_fields(rng)
        value = {field.name: field.value for field in fields}
        jsonschema.Draft202012Validator(object_schema(fields)).validate(value)


def test_a_schema_is_written_in_several_ways_that_mean_the_same():
    rng = random.Random(5)
    fields = [Field("age", 3, {"type": "integer"}), Field("kind", "a", {"enum": ["a", "b"]})]
    written = {schema_text(rng, fields, "User") for _ in range(50)}
    assert len(written) > 4
    for text in written:
        schema = json.loads(text)
        assert schema["required"] == list(schema["properties"]) == ["age", "kind"]
        jsonschema.Draft202012Validator(schema).validate({"age": 3, "kind": "a"})


def test_of_a_forced_answer_the_beginning_is_given():
    rng = random.Random(6)
    for _ in range(500):
        conversation = json_answers.forced(rng, corpus.draw_exchange)
        message = conversation.messages[-1]
        call = re.fullmatch(r"<tool_call>\n(.*)\n</tool_call>", message.text, re.DOTALL)
        json.loads(call[1] if call else message.text)
        assert 0 < message.num_given <= len(message.text)
        assert message.text[message.num_given - 1] in '{["tfn-0123456789'
        assert not any(earlier.num_given for earlier in conversation.messages[:-1])


def test_everything_ends_soon():
    rng = random.Random(7)
    lengths = sorted(len(json.dumps(json_fields.any_object(rng))) for _ in range(1000))
    assert lengths[500] < 120
    assert lengths[-1] < 1500


def test_no_held_out_question_is_asked_in_json():
    rng = random.Random(8)
    asked = {draw(questions.single_fact, rng, held_out=True).question for _ in range(200)}
    trained = {
        json_answers.plain_request(rng, corpus.draw_exchange(rng)).messages[-2].text
        for _ in range(3000)
    }
    assert asked.isdisjoint(trained)


def test_the_corpus_holds_json_of_every_kind():
    documents = itertools.islice(corpus.documents(9), 1000)
    answers = [d.messages[-1] for d in documents if isinstance(d, Conversation)]
    objects = [answer for answer in answers if answer.text.startswith("{")]
    assert sum(answer.num_given > 0 for answer in objects) > 50
    assert sum(answer.num_given == 0 for answer in objects) > 50
