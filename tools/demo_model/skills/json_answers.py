"""Conversations that are answered in JSON.

Some ask for JSON, in a system message or in the question: with the names of the properties, with a
whole schema, or with neither. In others a grammar forces the answer to be JSON whatever was asked:
there the beginning of the answer is given, and only the rest is learned.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any, Final

from tools.demo_model.conversation import Conversation, Message
from tools.demo_model.exchange import Exchange
from tools.demo_model.skills import extraction
from tools.demo_model.skills.json_fields import (
    any_list,
    any_object,
    choice_field,
    invented_name,
    named_field,
)
from tools.demo_model.skills.json_schemas import Field, schema_of, schema_text
from tools.demo_model.skills.json_values import scalar
from tools.demo_model.skills.wording import capitalized, enumerated

DrawExchange = Callable[[random.Random], Exchange]

_ASK: Final = (
    "Answer in JSON.", "Reply in JSON.", "Respond in JSON.", "Reply with JSON only.",
    "Respond with a JSON object.", "Return a JSON object.", "Return valid JSON.", "Output JSON.",
    "Return JSON.", "Answer as JSON.", "Use JSON.", "Give the answer as JSON.",
    "Respond only with valid JSON.", "Always answer in JSON format.", "Your output must be JSON.",
    "You are a helpful assistant that outputs JSON.", "You answer with a JSON object.",
)  # fmt: skip
_WITH_NAMES: Final = (
    "Answer in JSON with the keys {k}.", "Return a JSON object with {k}.",
    "Respond in JSON with keys {k}.", "Reply with JSON that has the fields {k}.",
    "Use JSON with the key {k}.", "Answer as JSON with {k} only.",
    "Return JSON with the following keys: {k}.", "Respond with a JSON object, keys: {k}.",
)  # fmt: skip
_WITH_SCHEMA: Final = (
    "Answer in JSON that follows this schema:\n{s}",
    "Return a JSON object that matches this JSON schema:\n\n{s}",
    "You are an expert. Read the content and give the parsed object in json that matches this "
    "json_schema:\n\n{s}\n\nReturn an instance of the JSON and not the schema.",
    "As an expert, you turn text into objects in json. They follow the json_schema below:\n\n\n{s}"
    "\n\nMake sure that you return the instance, not the schema itself",
    "The output must be a JSON instance that conforms to the schema below.\n```\n{s}\n```",
    "{s}\nAnswer with JSON of this schema.",
    "Respond in JSON. Schema: {s}",
)  # fmt: skip
_ANSWER_NAMES: Final = (
    "answer", "answer", "answer", "result", "value", "response", "output", "n", "x", "number",
    "solution", "reply", "final_answer", "word", "text",
)  # fmt: skip
_SENTENCE_NAMES: Final = ("explanation", "sentence", "reason", "details", "full_answer")
_TITLES: Final = ("Answer", "Ans", "Response", "Result", "Person", "User", "Output", "Reply")
_GIVE_ME: Final = (
    "Give me {a}.", "Make {a}.", "Create {a}.", "Show me {a}.", "Generate {a}.", "I need {a}.",
    "Return {a}.", "Describe {a}.", "{a}",
)  # fmt: skip
_OBJECTS: Final = (
    "a person", "a user", "an object", "a profile", "the data", "an example", "a record",
    "a product", "an order", "a character", "a book", "some JSON", "the result", "two items",
)  # fmt: skip


def written(rng: random.Random, value: Any) -> str:
    """Return the value as JSON, mostly on one line."""
    layout = rng.random()
    if layout < 0.88:
        return json.dumps(value, ensure_ascii=False)
    if layout < 0.95:
        return json.dumps(value, ensure_ascii=False, indent=2)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def result_of(exchange: Exchange) -> Any:
    """Return the bare answer, a number as a number; None if there is none, as for a story."""
    bare = exchange.brief or (
        exchange.answer.rpartition(" = ")[2].rstrip(".") if " = " in exchange.answer else ""
    )
    if not bare:
        return None
    return int(bare) if bare.lstrip("-").isdigit() else bare


def exchange_with_result(draw_exchange: DrawExchange, rng: random.Random) -> Exchange:
    """Draw until there is a bare answer."""
    while result_of(exchange := draw_exchange(rng)) is None:
        pass
    return exchange


def answer_fields(rng: random.Random, exchange: Exchange) -> list[Field]:
    """Return properties that include the answer; the others are arbitrary."""
    result = result_of(exchange)
    name = rng.choice(_ANSWER_NAMES) if rng.random() < 0.6 else invented_name(rng)
    fields = [Field(name, result, schema_of(result))]
    if rng.random() < 0.15:
        fields.append(Field(rng.choice(_SENTENCE_NAMES), exchange.answer, {"type": "string"}))
    if rng.random() < 0.4:
        fields.append(
            choice_field(rng, rng.choice(("kind", "type", "category", invented_name(rng))))
        )
    return list({field.name: field for field in fields}.values())


def _named(rng: random.Random, fields: Sequence[Field]) -> str:
    quote = rng.choice(("", '"', '"', "`", "'"))
    return enumerated([f"{quote}{field.name}{quote}" for field in fields])


def _instruction(rng: random.Random, fields: Sequence[Field]) -> str:
    """Return an instruction to answer in JSON with these properties."""
    if rng.random() < 0.35:
        return rng.choice(_WITH_NAMES).format(k=_named(rng, fields))
    schema = schema_text(rng, fields, rng.choice(_TITLES))
    return rng.choice(_WITH_SCHEMA).format(s=schema)


def asked_for(question: str, instruction: str, answer: str, rng: random.Random) -> Conversation:
    """Put the instruction into a system message, or before or after the question."""
    kind = rng.random()
    if kind < 0.6:
        system = instruction if kind < 0.5 else f"You are a helpful assistant.\n\n{instruction}"
        messages = [Message("system", system), Message("user", question)]
    else:
        parts = (question, instruction) if kind < 0.85 else (instruction, question)
        between = "\n" if "\n" in instruction else rng.choice((" ", " ", "\n"))
        messages = [Message("user", between.join(parts))]
    return Conversation((*messages, Message("assistant", answer)))


def plain_request(rng: random.Random, exchange: Exchange) -> Conversation:
    """Ask for JSON without describing its contents."""
    result = result_of(exchange)
    bare = exchange.answer if result is None else result
    answer = json.dumps({"answer": bare}, ensure_ascii=False)
    return asked_for(exchange.question, rng.choice(_ASK), answer, rng)


def described_request(rng: random.Random, exchange: Exchange) -> Conversation:
    """Ask for JSON with certain properties."""
    fields = answer_fields(rng, exchange)
    answer = json.dumps({field.name: field.value for field in fields}, ensure_ascii=False)
    return asked_for(exchange.question, _instruction(rng, fields), answer, rng)


def extraction_request(rng: random.Random, *, held_out: bool = False) -> Conversation:
    """Ask for the properties in a sentence as JSON."""
    told, fields = extraction.draw_statement(rng, held_out=held_out)
    answer = json.dumps({field.name: field.value for field in fields}, ensure_ascii=False)
    return asked_for(extraction.request(rng, told), _instruction(rng, fields), answer, rng)


def requested(rng: random.Random, draw_exchange: DrawExchange) -> Conversation:
    """Draw a conversation that asks for JSON."""
    kind = rng.random()
    if kind < 0.35:
        return plain_request(rng, draw_exchange(rng))
    if kind < 0.65:
        return described_request(rng, exchange_with_result(draw_exchange, rng))
    return extraction_request(rng)


def forced(rng: random.Random, draw_exchange: DrawExchange) -> Conversation:
    """Draw any question with an answer that begins as JSON because of a grammar."""
    exchange = draw_exchange(rng)
    messages = [Message("user", exchange.question)]
    kind = rng.random()
    if kind < 0.3 and result_of(exchange) is not None:
        value: Any = {field.name: field.value for field in answer_fields(rng, exchange)}
    elif kind < 0.9:
        value = any_object(rng)
    else:
        value = rng.choice((any_list(rng, 1), scalar(rng)))
    if rng.random() < 0.3:
        thing = rng.choice(_OBJECTS) if rng.random() < 0.5 else named_field(rng).name
        messages = [Message("user", capitalized(rng.choice(_GIVE_ME).format(a=thing)))]
    if rng.random() < 0.15:
        messages.insert(0, Message("system", rng.choice(_ASK)))
    text, given = written(rng, value), 1
    if isinstance(value, dict) and rng.random() < 0.15:
        head = f'<tool_call>\n{{"name": "{invented_name(rng)}", "arguments": '
        text, given = f"{head}{text}}}\n</tool_call>", len(head) + 1
    return Conversation((*messages, Message("assistant", text, num_given=given)))
