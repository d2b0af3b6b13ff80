"""POST /v1/responses, and how many tokens it would read: POST /v1/responses/input_tokens."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from aiohttp import web

from coordinator.api.answer import answer
from coordinator.api.call import CallPlan
from coordinator.api.chat import encode_chat, plan_chat
from coordinator.api.chat_parts import PartsPlan
from coordinator.api.context import CONTEXT, TRACE
from coordinator.api.endpoint import admit
from coordinator.api.formats import AnswerHead
from coordinator.api.limits import output_limit
from coordinator.api.responses_api.asked import Asked, read_asked
from coordinator.api.responses_api.background import BackgroundRun
from coordinator.api.responses_api.chat_request import in_our_words
from coordinator.api.responses_api.follow import follow
from coordinator.api.responses_api.format import ResponseFormat
from coordinator.api.responses_api.keeper import make_keeper
from coordinator.api.responses_api.objects import (
    InputTokens,
    KeptItem,
    ReasoningShown,
    Response,
    TextShown,
)
from coordinator.api.responses_api.requests import (
    LOGPROBS,
    ConversationReference,
    TextFormat,
)
from coordinator.api.responses_api.stored import RESPONSE_ID, StoredResponse
from coordinator.api.responses_api.truncation import fitted
from coordinator.api.terms import service_terms

T = TypeVar("T")
_TIERS = ("flex", "priority")  # that make a difference
_JSON = "application/json"


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, or go on with one."""
    context = request.app[CONTEXT]
    trace = admit(request, context)
    asked = await read_asked(request, context, trace)
    body = asked.body
    terms = service_terms(body, request.headers, context, trace)
    response = _begun(asked, RESPONSE_ID.format(trace.unique))
    keeper = make_keeper(context.stored, asked, response, trace.owner)

    def make_format(head: AnswerHead, parts: PartsPlan, prompt: Sequence[int]) -> ResponseFormat:
        shows_logprobs = LOGPROBS in (body.include or [])
        return ResponseFormat(
            response, context.tokenizer, parts, keeper.keep, shows_logprobs=shows_logprobs
        )

    async def plan_for(items: Sequence[KeptItem]) -> CallPlan:
        return await plan_chat(asked.chat(items), context, terms, response.id, make_format)

    with in_our_words():
        plan = await _fitted(asked, plan_for)
    if not body.background:
        return await answer(request, context, plan)
    return await _in_background(request, plan, keeper.stored)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Nothing is answered, so nothing is kept."""
    context = request.app[CONTEXT]
    asked = await read_asked(request, context, request[TRACE])

    async def count(items: Sequence[KeptItem]) -> int:
        num_tokens = len(await encode_chat(asked.chat(items), context))
        if asked.body.truncation == "auto":
            limit = asked.body.max_output_tokens
            output_limit(num_tokens, limit, None, context.max_model_len())
        return num_tokens

    with in_our_words():
        num_tokens = await _fitted(asked, count)
    body = msgspec.json.encode(InputTokens(input_tokens=num_tokens))
    return web.Response(body=body, content_type=_JSON)


async def _in_background(
    request: web.Request, plan: CallPlan, stored: StoredResponse
) -> web.StreamResponse:
    """The response as it is once its call has begun, or the stream of it."""
    context, trace = request.app[CONTEXT], request[TRACE]

    def take_over() -> None:
        request[TRACE] = trace.without_call()

    assert isinstance(plan.format, ResponseFormat)
    trace.is_streaming = plan.is_streaming
    body = await BackgroundRun(context, trace, plan, plan.format, stored, take_over).begin()
    if stored.log is not None:
        return await follow(request, stored.log, 0)
    return web.Response(body=body, content_type=_JSON)


async def _fitted(asked: Asked, attempt: Callable[[Sequence[KeptItem]], Awaitable[T]]) -> T:
    """What the attempt makes of all items, or of as many as fit if the rest may be left out."""
    if asked.body.truncation == "auto":
        return await fitted(asked.items, attempt)
    return await attempt(asked.items)


def _begun(asked: Asked, response_id: str) -> Response:
    """A response of which nothing has been made yet."""
    body, conversation = asked.body, asked.conversation
    wanted = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    return Response(
        id=response_id,
        created_at=int(time.time()),
        background=bool(body.background),
        conversation=None if conversation is None else ConversationReference(id=conversation.id),
        frequency_penalty=body.frequency_penalty or 0.0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=body.presence_penalty or 0.0,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningShown(effort),
        safety_identifier=body.safety_identifier,
        service_tier=body.service_tier if body.service_tier in _TIERS else "default",
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextShown(wanted or TextFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
