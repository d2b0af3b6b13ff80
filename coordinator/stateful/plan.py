"""Plans a response as a chat call whose answer is formatted as items."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from secrets import token_bytes
from typing import TypeVar

from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.sse import framed
from coordinator.api.chat import ChatPlan, plan_chat
from coordinator.api.context import RequestTrace
from coordinator.api.read.ask import Ask
from coordinator.api.read.idempotency import KeyedCall
from coordinator.api.read.terms import TERMS_HEADERS, service_terms
from coordinator.api.responses.chat_request import in_our_words
from coordinator.api.responses.events import Frame
from coordinator.api.responses.format import ItemsFormat
from coordinator.api.responses.items import KeptItem
from coordinator.api.responses.objects import ReasoningShown, Response, TextShown
from coordinator.api.responses.requests import (
    LOGPROBS,
    ConversationReference,
    TextConfig,
    TextFormat,
)
from coordinator.api.responses.truncation import fitted
from coordinator.api.tiers.run import plan_in_tiers
from coordinator.stateful.asked import Asked
from coordinator.stateful.keeper import make_keeper
from coordinator.stateful.storage.order import Order
from coordinator.stateful.storage.stored import RESPONSE_ID, StoredResponse

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned response."""

    call: CallPlan
    format: ItemsFormat  # format of the call
    stored: StoredResponse  # the response as it will be stored
    is_stored: bool  # whether it is stored for later requests


async def plan_response(
    asked: Asked,
    ask: Ask,
    frame: Frame = framed,
    order: Order | None = None,
) -> Planned:
    """Validate the request and plan the call, before anything runs; for an `order`, again.

    Raises RequestError.
    """
    context, trace = ask.context, ask.trace
    if order is None and asked.order:
        order = _ordered(asked, ask.headers, trace)
    terms = service_terms(asked.body, ask.headers, context, trace)
    created_at = int(time.time()) if order is None else order.created_at
    response = _begun(asked, RESPONSE_ID.format(trace.unique), created_at, terms.tier)
    keeper = make_keeper(asked, response, trace.owner)
    keeper.stored.order = order

    async def plan_for(items: Sequence[KeptItem]) -> ChatPlan:
        return await plan_chat(asked.chat(items), asked.model, context, terms, response.id)

    with in_our_words():
        plan = await as_fitted(asked, plan_for)
    response_format = ItemsFormat(
        response,
        asked.model.tokenizer,
        plan.parts,
        keeper.keep,
        frame,
        shows_logprobs=LOGPROBS in (asked.body.include or []),
    )
    call = plan.call(response_format, saved=keeper.saved)
    return Planned(call, response_format, keeper.stored, response.store)


async def plan_asked(
    ask: Ask,
    read: Callable[[Ask], Awaitable[Asked]],
    frame: Frame = framed,
    order: Order | None = None,
) -> Planned:
    """Read a call and plan it, for a cascade as `plan_in_tiers`. Raises as `plan_response`."""

    async def plan(ask: Ask) -> Planned:
        return await plan_response(await read(ask), ask, frame, order)

    cascade = ask.cascade
    if cascade is None:
        return await plan(ask)
    return await plan_in_tiers(
        ask, cascade, plan, lambda p: p.call, lambda p, call: replace(p, call=call)
    )


async def as_fitted(asked: Asked, attempt: Callable[[Sequence[KeptItem]], Awaitable[T]]) -> T:
    """Call `attempt` with all items, or, with truncation "auto", with as many as fit."""
    if asked.body.truncation == "auto":
        return await fitted(asked.items, attempt)
    return await attempt(asked.items)


def _ordered(asked: Asked, headers: Mapping[str, str], trace: RequestTrace) -> Order:
    """Return the order of a background response, whose call is keyed from now on."""
    if trace.keyed is None:
        trace.keyed = KeyedCall(trace.owner, "", "", None, digest=token_bytes(32))
    return Order(
        body=asked.order,
        headers={name: headers[name] for name in TERMS_HEADERS if name in headers},
        unique=trace.unique,
        request_id=trace.request_id,
        address=trace.address,
        key_id="" if trace.caller is None else trace.caller.key_id,
        digest=trace.keyed.digest,
        created_at=int(time.time()),
        is_streamed=bool(asked.body.stream),
    )


def _begun(asked: Asked, response_id: str, created_at: int, service_tier: str) -> Response:
    """Return the response object before anything has been generated."""
    body, conversation = asked.body, asked.conversation
    default = asked.model.sampling
    text = body.text or TextConfig()
    effort = None if body.reasoning is None else body.reasoning.effort
    return Response(
        id=response_id,
        created_at=created_at,
        background=bool(body.background),
        conversation=None if conversation is None else ConversationReference(id=conversation.id),
        frequency_penalty=body.frequency_penalty or 0.0,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=asked.body.model or asked.model.name,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        presence_penalty=body.presence_penalty or 0.0,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning=ReasoningShown(effort),
        safety_identifier=body.safety_identifier,
        service_tier=service_tier,
        store=body.store is not False,
        temperature=default.temperature if body.temperature is None else body.temperature,
        text=TextShown(text.format or TextFormat(type="text"), text.verbosity or "medium"),
        tool_choice=body.tool_choice or "auto",
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=default.top_p if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )
