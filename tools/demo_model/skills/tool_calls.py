"""Conversations that offer functions: call the right one, or answer without a call.

The text is what the chat template renders for tools, calls and results (tokenizer.py), in the
format of Hermes models.
"""

import random
from collections.abc import Sequence
from typing import Final

from tools.demo_model.conversation import Conversation, Message
from tools.demo_model.exchange import Exchange, is_key_held_out
from tools.demo_model.skills.json_answers import DrawExchange
from tools.demo_model.skills.tool_offers import offer_of
from tools.demo_model.skills.tool_rounds import Round, draw_round

_SKILL: Final = "tool calls"
_MAX_OFFERED: Final = 3


def offered(rng: random.Random, drawn: Round) -> Message:
    """Return the system message with the round's tools and often some others."""
    several = list(drawn.offers)
    names = {offer.name for offer in several}
    while len(several) < _MAX_OFFERED and rng.random() < 0.4:
        other, _ = offer_of(rng, rng.choice(drawn.others))
        known = {field.name for offer in several for field in offer.parameters}
        if other.name not in names and known.isdisjoint(f.name for f in other.parameters):
            several.append(other)
            names.add(other.name)
    rng.shuffle(several)
    lines = "\n".join(offer.text(rng) for offer in several)
    return Message("system", f"<tools>\n{lines}\n</tools>")


def conversation(rng: random.Random, draw_exchange: DrawExchange) -> Conversation:
    """Draw a conversation with tools: calls and, usually, the answer after their results."""
    while is_held_out(drawn := draw_round(rng, draw_exchange)):
        pass
    before = [draw_exchange(rng)] if rng.random() < 0.1 else []
    return Conversation((*asked(rng, drawn, before), *answered(rng, drawn)))


def asked(rng: random.Random, drawn: Round, before: Sequence[Exchange] = ()) -> list[Message]:
    """Return the messages up to the question."""
    messages = [offered(rng, drawn)]
    if rng.random() < 0.25:
        messages.append(Message("system", "You are a helpful assistant."))
    for exchange in before:
        messages.append(Message("user", exchange.question))
        messages.append(Message("assistant", exchange.answer))
    return [*messages, Message("user", drawn.question)]


def answered(rng: random.Random, drawn: Round) -> list[Message]:
    """Return the messages after the question; sometimes without the results."""
    if not drawn.results or rng.random() < 0.4:
        return [Message("assistant", drawn.first_answer)]
    return outcome(drawn)


def outcome(drawn: Round) -> list[Message]:
    """Return the calls, their results and the final answer."""
    responses = (f"<tool_response>\n{result}\n</tool_response>" for result in drawn.results)
    return [
        Message("assistant", drawn.first_answer),
        *(Message("user", response) for response in responses),
        Message("assistant", drawn.answer),
    ]


def is_held_out(drawn: Round) -> bool:
    """Return whether the round belongs to the evaluation only; rounds without calls never do."""
    return bool(drawn.calls) and is_key_held_out(_SKILL, drawn.question)
