"""Plans a message as a chat whose answer is formatted as blocks; and counts a prompt's tokens."""

from __future__ import annotations

from coordinator.api.answer.call import CallPlan
from coordinator.api.chat import plan_chat
from coordinator.api.messages.chat_request import chat_request, in_our_words
from coordinator.api.messages.events import PING
from coordinator.api.messages.format import MessagesFormat
from coordinator.api.messages.objects import CountedTokens, MadeMessage, MessageUsage, Tier
from coordinator.api.messages.requests import CountRequest, MessagesRequest
from coordinator.api.prompt.chat import encode_chat
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.terms import ServiceTerms, service_terms
from coordinator.api.tokens import counting


async def plan_message(ask: Ask) -> CallPlan:
    """Plan the answer to a conversation, which keeps nothing of the body. Raises RequestError."""
    context, trace = ask.context, ask.trace
    body = convert_request(ask.values, MessagesRequest)
    chat = chat_request(body)
    model = await ask.model(body.model)
    terms = service_terms(chat, ask.headers, context, trace)
    message_id = f"msg_{trace.unique}"
    with in_our_words():
        plan = await plan_chat(chat, model, context, terms, message_id)
    is_limited = plan.most_tokens < body.max_tokens
    usage = MessageUsage(
        input_tokens=0, cache_read_input_tokens=0, output_tokens=0, service_tier=_tier(terms)
    )
    message_format = MessagesFormat(
        MadeMessage(id=message_id, model=body.model, usage=usage),
        plan.parts,
        trace.request_id,
        shows_thinking=body.thinking is None or body.thinking.display != "omitted",
        is_limited=is_limited,
    )
    return plan.at_most(body.max_tokens).call(message_format, counts_along=True, keep_alive=PING)


async def count_tokens(ask: Ask) -> CountedTokens:
    """POST /v1/messages/count_tokens: count the tokens of a prompt; nothing is generated."""
    chat = chat_request(convert_request(ask.values, CountRequest))
    model = await ask.model(chat.model)
    with in_our_words():
        return CountedTokens(len(await encode_chat(chat, model, counting(ask.trace))))


def _tier(terms: ServiceTerms) -> Tier:
    return "priority" if terms.tier == "fast" else "standard"
