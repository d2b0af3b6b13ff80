"""POST /v1/responses, and how many tokens it would read: POST /v1/responses/input_tokens."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from coordinator.api.answer import answer
from coordinator.api.body import convert_request, read_object
from coordinator.api.chat import encode_chat, plan_chat
from coordinator.api.chat_parts import PartsPlan
from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace
from coordinator.api.endpoint import admit
from coordinator.api.formats import AnswerHead
from coordinator.api.requests import ChatRequest
from coordinator.api.responses_api.chat_request import chat_request, in_our_words
from coordinator.api.responses_api.conversation import messages_of
from coordinator.api.responses_api.format import ResponseFormat
from coordinator.api.responses_api.given import check_items, items_of
from coordinator.api.responses_api.objects import (
    InputTokens,
    Item,
    KeptItem,
    ReasoningShown,
    Response,
    TextShown,
)
from coordinator.api.responses_api.requests import LOGPROBS, ResponseRequest, TextFormat
from coordinator.api.responses_api.store import RESPONSE_ID, ResponseStore, StoredResponse
from coordinator.api.terms import service_terms

_TIERS = ("flex", "priority")  # that make a difference


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, or go on with one."""
    context = request.app[CONTEXT]
    trace = admit(request, context)
    asked = await _read(request, context, trace)
    body = asked.body
    asked.chat.stream = body.stream
    terms = service_terms(asked.chat, request.headers, context, trace)
    response = _begun(body, RESPONSE_ID.format(trace.unique))

    def make_format(head: AnswerHead, parts: PartsPlan, prompt: Sequence[int]) -> ResponseFormat:
        keeper = _Keeper(context.stored, trace.owner, response, asked)
        return ResponseFormat(
            response,
            context.tokenizer,
            parts,
            keeper.keep,
            shows_logprobs=LOGPROBS in (body.include or []),
        )

    with in_our_words():
        plan = await plan_chat(asked.chat, context, terms, response.id, make_format)
    return await answer(request, context, plan)


async def count_input_tokens(request: web.Request) -> web.Response:
    """Nothing is answered, so nothing is kept."""
    context = request.app[CONTEXT]
    asked = await _read(request, context, request[TRACE])
    with in_our_words():
        token_ids = await encode_chat(asked.chat, context)
    body = msgspec.json.encode(InputTokens(input_tokens=len(token_ids)))
    return web.Response(body=body, content_type="application/json")


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a body asks for, in the words of chat too."""

    body: ResponseRequest
    chat: ChatRequest
    earlier: Sequence[KeptItem]  # the conversation that is gone on with
    earlier_bytes: int
    new: Sequence[KeptItem]


async def _read(request: web.Request, context: ApiContext, trace: RequestTrace) -> _Asked:
    """Raises InvalidRequest, ModelNotFound or ResponseNotFound."""
    values = await read_object(request, context.config)
    check_items(values)
    body = convert_request(values, ResponseRequest)
    context.check_model(body.model)
    stored, owner = context.stored, trace.owner
    earlier: Sequence[KeptItem] = ()
    earlier_bytes = 0
    if body.previous_response_id is not None:
        before = stored.get(body.previous_response_id, owner, "previous_response_id")
        earlier, earlier_bytes = before.items, before.items_bytes
    new = items_of(
        body.input, trace.unique, earlier, lambda item_id: stored.find_item(item_id, owner)
    )
    with in_our_words():
        chat = chat_request(body, messages_of([*earlier, *new]))
    return _Asked(body, chat, earlier, earlier_bytes, new)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Puts one response into the store, if it is to be kept."""

    stored: ResponseStore
    owner: str
    response: Response
    asked: _Asked

    def keep(self, body: bytes, output: Sequence[Item]) -> None:
        """See ResponseFormat."""
        if not self.response.store:
            return
        asked = self.asked
        new = (*asked.new, *output)
        self.stored.put(
            StoredResponse(
                id=self.response.id,
                owner=self.owner,
                body=body,
                items=(*asked.earlier, *new),
                num_input_items=len(asked.earlier) + len(asked.new),
                items_bytes=asked.earlier_bytes + len(msgspec.json.encode(new)),
            )
        )


def _begun(body: ResponseRequest, response_id: str) -> Response:
    """A response of which nothing has been made yet."""
    wanted = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    return Response(
        id=response_id,
        created_at=int(time.time()),
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
        user=body.user,
    )
