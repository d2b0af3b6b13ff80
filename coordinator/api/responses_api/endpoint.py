"""POST /v1/responses, GET and DELETE /v1/responses/{id}."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from aiohttp import web

from coordinator.api.answer import answer
from coordinator.api.body import convert_request, read_object
from coordinator.api.chat import plan_chat
from coordinator.api.chat_parts import PartsPlan
from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace
from coordinator.api.endpoint import admit
from coordinator.api.formats import AnswerHead
from coordinator.api.requests import Message
from coordinator.api.responses_api.chat_request import chat_request, in_our_words
from coordinator.api.responses_api.conversation import check_items, messages_of
from coordinator.api.responses_api.format import ResponseFormat
from coordinator.api.responses_api.objects import (
    DeletedResponse,
    ReasoningShown,
    Response,
    TextShown,
)
from coordinator.api.responses_api.requests import LOGPROBS, ResponseRequest, TextFormat
from coordinator.api.responses_api.store import ResponseStore, StoredResponse
from coordinator.api.terms import service_terms
from pdserve.errors import InvalidRequest

_JSON = "application/json"


async def create_response(request: web.Request) -> web.StreamResponse:
    """Answer a conversation, or go on with one."""
    context = request.app[CONTEXT]
    trace = admit(request, context)
    values = await read_object(request, context.config)
    check_items(values)
    body = convert_request(values, ResponseRequest)
    context.check_model(body.model)
    earlier = _earlier(body, context, trace)
    new = messages_of(body.input, earlier.messages)
    with in_our_words():
        chat = chat_request(body, [*earlier.messages, *new])
    chat.stream = body.stream
    terms = service_terms(chat, request.headers, context, trace)
    response = _begun(body, f"resp_{trace.unique}")

    def make_format(head: AnswerHead, parts: PartsPlan, prompt: Sequence[int]) -> ResponseFormat:
        keeper = _Keeper(context.stored, _owner(trace), response, earlier, new)
        return ResponseFormat(
            response,
            context.tokenizer,
            parts,
            keeper.keep,
            shows_logprobs=LOGPROBS in (body.include or []),
        )

    with in_our_words():
        plan = await plan_chat(chat, context, terms, response.id, make_format)
    return await answer(request, context, plan)


async def get_response(request: web.Request) -> web.Response:
    """One that was stored."""
    for name in ("stream", "starting_after", "include"):
        if request.query.get(name, "false").lower() != "false":
            raise InvalidRequest(f"{name!r} is not supported for a stored response", name)
    stored = request.app[CONTEXT].stored.get(request.match_info["response"], _owner(request[TRACE]))
    return web.Response(body=stored.body, content_type=_JSON)


async def delete_response(request: web.Request) -> web.Response:
    """It can be fetched no more, nor gone on from; those that went on from it stay."""
    response_id = request.match_info["response"]
    request.app[CONTEXT].stored.delete(response_id, _owner(request[TRACE]))
    return web.Response(
        body=msgspec.json.encode(DeletedResponse(id=response_id)), content_type=_JSON
    )


@dataclass(frozen=True, slots=True)
class _Earlier:
    """The conversation that a response goes on with."""

    messages: tuple[Message, ...] = ()
    num_bytes: int = 0


def _earlier(body: ResponseRequest, context: ApiContext, trace: RequestTrace) -> _Earlier:
    """Raises ResponseNotFound."""
    if body.previous_response_id is None:
        return _Earlier()
    stored = context.stored.get(body.previous_response_id, _owner(trace), "previous_response_id")
    return _Earlier(stored.messages, stored.messages_bytes)


@dataclass(frozen=True, slots=True)
class _Keeper:
    """Puts one response into the store, if it is to be kept."""

    stored: ResponseStore
    owner: str
    response: Response
    earlier: _Earlier
    new: list[Message]

    def keep(self, body: bytes, said: Message) -> None:
        """See ResponseFormat."""
        if not self.response.store:
            return
        new = (*self.new, said)
        self.stored.put(
            StoredResponse(
                id=self.response.id,
                owner=self.owner,
                body=body,
                messages=self.earlier.messages + new,
                messages_bytes=self.earlier.num_bytes + len(msgspec.json.encode(new)),
            )
        )


def _owner(trace: RequestTrace) -> str:
    """The tenant's name; empty where no keys are in use."""
    return "" if trace.caller is None else trace.caller.tenant.name


def _begun(body: ResponseRequest, response_id: str) -> Response:
    """A response of which nothing has been made yet."""
    wanted = None if body.text is None else body.text.format
    effort = None if body.reasoning is None else body.reasoning.effort
    return Response(
        id=response_id,
        created_at=int(time.time()),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        metadata=body.metadata or {},
        model=body.model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        previous_response_id=body.previous_response_id,
        reasoning=ReasoningShown(effort),
        store=body.store is not False,
        temperature=1.0 if body.temperature is None else body.temperature,
        text=TextShown(wanted or TextFormat(type="text")),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=1.0 if body.top_p is None else body.top_p,
    )
