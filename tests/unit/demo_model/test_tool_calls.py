"""Conversations with functions: as the chat template writes them, and with calls that are valid."""

import json
import random
import re

import jsonschema
import pytest
from transformers import AutoTokenizer

from pdserve.demo_model import CHECKPOINT_PATH
from tools.demo_model import corpus
from tools.demo_model.conversation import Conversation, Message
from tools.demo_model.exchange import Exchange
from tools.demo_model.skills import tool_calls, tool_rounds
from tools.demo_model.skills.tools import TASKS

CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>")
RESPONSE = re.compile(r"<tool_response>\n(.*)\n</tool_response>")


def conversations(count: int) -> list[Conversation]:
    rng = random.Random(1)
    return [tool_calls.conversation(rng, corpus.draw_exchange) for _ in range(count)]


def tools_of(conversation: Conversation) -> list[dict[str, object]]:
    first, *functions, last = conversation.messages[0].text.split("\n")
    assert (first, last) == ("<tools>", "</tools>")
    return [json.loads(function) for function in functions]


def calls_of(message: Message) -> list[dict[str, object]]:
    return [json.loads(call) for call in CALL.findall(message.text)]


def as_given_to_the_template(message: Message) -> dict[str, object]:
    """The message as a client of the API would send it."""
    if response := RESPONSE.fullmatch(message.text):
        return {"role": "tool", "content": response[1]}
    if calls := calls_of(message):
        functions = [{"type": "function", "function": call} for call in calls]
        return {"role": message.role, "content": None, "tool_calls": functions}
    return {"role": message.role, "content": message.text}


def test_the_text_is_what_the_chat_template_writes():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT_PATH)
    for conversation in conversations(100):
        rendered = tokenizer.apply_chat_template(
            [as_given_to_the_template(message) for message in conversation.messages[1:]],
            tools=[{"type": "function", "function": tool} for tool in tools_of(conversation)],
            tokenize=False,
        )
        texts = (f"<|{message.role}|>{message.text}<|end|>" for message in conversation.messages)
        assert rendered == "<|bos|>" + "".join(texts)


def test_calls_are_of_functions_that_are_offered_with_valid_arguments():
    num_calls = 0
    for conversation in conversations(500):
        tools = {tool["name"]: tool for tool in tools_of(conversation)}
        for message in conversation.messages:
            for call in calls_of(message):
                schema = tools[call["name"]]["parameters"]
                jsonschema.Draft202012Validator(schema).validate(call["arguments"])
                assert set(call["arguments"]) <= set(schema["properties"])
                num_calls += 1
    assert num_calls > 300


def test_what_is_said_in_the_question_is_what_the_call_gets():
    rng = random.Random(2)
    for task in TASKS:
        for _ in range(30):
            drawn = tool_rounds.single_round(rng, task)
            (call,) = calls_of(Message("assistant", drawn.first_answer))
            optional = {slot.choices[:1] for slot in task.slots if slot.is_optional}
            for value in call["arguments"].values():
                assert str(value).lower() in drawn.question.lower() or (value,) in optional


def test_every_result_is_answered_with_what_it_says():
    rng = random.Random(3)
    for task in TASKS:
        drawn = tool_rounds.single_round(rng, task)
        for result in drawn.results:
            values = re.findall(r"-?\d+|[a-z]{3,}", result.rpartition(":")[2].lower())
            known = {"ok", "sent", "done", "started", *re.findall(r"\w+", drawn.question.lower())}
            assert all(value in drawn.answer.lower() or value in known for value in values)


def test_two_things_take_two_calls_and_two_results():
    rng = random.Random(4)
    for task in TASKS:
        if not task.pairs:
            continue
        drawn = tool_rounds.double_round(rng, task)
        assert len(drawn.calls) == len(drawn.results) == 2
        messages = tool_calls.outcome(drawn)
        assert [message.role for message in messages] == ["assistant", "user", "user", "assistant"]


def test_what_no_function_fits_is_answered_plainly():
    plain = Exchange("addition", "What is 7 + 5?", "7 + 5 = 12.")
    rng = random.Random(5)
    for _ in range(100):
        drawn = tool_rounds.idle_round(rng, lambda _: plain)
        assert (drawn.calls, drawn.first_answer) == ((), "7 + 5 = 12.")
        names = " ".join(
            tool["name"] for tool in tools_of(Conversation((tool_calls.offered(rng, drawn),)))
        )
        assert not re.search(r"\b(add|calc|sum|plus|search)", names)


@pytest.mark.parametrize("seed", range(3))
def test_calls_are_held_out_by_their_question(seed):
    rng = random.Random(seed)
    for _ in range(300):
        conversation = tool_calls.conversation(rng, corpus.draw_exchange)
        called = [i for i, m in enumerate(conversation.messages) if calls_of(m)]
        if called:
            question = conversation.messages[called[0] - 1].text
            assert not tool_calls.is_held_out(tool_rounds.Round((), question, ("call",)))
