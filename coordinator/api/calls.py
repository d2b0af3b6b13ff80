"""Every kind of call that generates: path -> the plan of a call; and how others are answered.

A planner needs no connection. HTTP runs plans here; a WebSocket and background responses run those
of /v1/responses, which `coordinator/stateful` adds to the table.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, TypeVar

from aiohttp import web
from aiohttp.typedefs import Handler
from msgspec import Struct

from coordinator.api.answer.bodies import json_answer
from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.run import WholeAnswer, answer, whole_answer
from coordinator.api.answer.sse import SseStream
from coordinator.api.chat import plan_chat_call
from coordinator.api.completions import CompletionRequest, plan_completion
from coordinator.api.context import CONTEXT, TRACE, ApiContext
from coordinator.api.embeddings.plan import EmbeddingPlan, plan_embeddings
from coordinator.api.messages.plan import plan_message
from coordinator.api.read.ask import Ask, Question
from coordinator.api.read.body import read_object, read_parts, read_request
from coordinator.api.read.chat import ChatRequest
from coordinator.api.read.fields import GenerationFields
from coordinator.api.scoring.plan import (
    ScoringPlan,
    plan_bare_rerank,
    plan_rerank,
    plan_scores,
)
from coordinator.api.server.callers import admit, admit_keyed, begin
from coordinator.api.server.middleware import speaks_messages
from coordinator.api.tiers.away import AwayPlan, plan_away
from coordinator.api.tiers.run import plan_in_tiers

_S = TypeVar("_S")
_T = TypeVar("_T", bound=Struct)
Plan: TypeAlias = CallPlan | AwayPlan | EmbeddingPlan | ScoringPlan
Generating: TypeAlias = CallPlan | AwayPlan
# Validates a call and plans it, before anything runs. Raises RequestError.
Planner: TypeAlias = Callable[[Ask], Awaitable[Plan]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One row of the table."""

    plan: Planner
    is_keyed: bool = True  # whether it heeds an idempotency key


def in_tiers(plan: Callable[[Ask], Awaitable[CallPlan]]) -> Callable[[Ask], Awaitable[CallPlan]]:
    """Return a planner of calls that also plans those for cascades."""

    async def planned(ask: Ask) -> CallPlan:
        cascade = ask.cascade
        if cascade is None:
            return await plan(ask)
        return await plan_in_tiers(ask, cascade, plan, lambda call: call, lambda _, call: call)

    return planned


def also_away(
    plan: Callable[[Ask], Awaitable[CallPlan]], schema: type[GenerationFields]
) -> Callable[[Ask], Awaitable[Generating]]:
    """As `in_tiers`, for calls that a server elsewhere may answer, too; `schema` is the body's."""

    async def planned(ask: Ask) -> Generating:
        cascade = ask.cascade
        if cascade is None:
            return await plan(ask)
        return await plan_in_tiers(
            ask, cascade, plan, _own, lambda _, call: call, partial(plan_away, schema)
        )

    return planned


def _own(plan: Generating) -> CallPlan:
    assert isinstance(plan, CallPlan), "it was planned for a model of this cluster"
    return plan


CALLS = web.AppKey("CALLS", dict[str, Endpoint])
ENDPOINTS = {
    "/v1/chat/completions": Endpoint(also_away(plan_chat_call, ChatRequest)),
    "/v1/completions": Endpoint(also_away(plan_completion, CompletionRequest)),
    "/v1/messages": Endpoint(in_tiers(plan_message)),
    "/v1/embeddings": Endpoint(plan_embeddings, is_keyed=False),
    "/v1/rerank": Endpoint(plan_rerank, is_keyed=False),
    "/rerank": Endpoint(plan_rerank, is_keyed=False),
    "/v2/rerank": Endpoint(plan_bare_rerank, is_keyed=False),
    "/v1/score": Endpoint(plan_scores, is_keyed=False),
    "/score": Endpoint(plan_scores, is_keyed=False),
}


async def run_whole(ask: Ask, plan: Plan, begun: Callable[[], None] = lambda: None) -> WholeAnswer:
    """Run a plan to its end, and return the answer in one piece. Raises what generations raise.

    `begun` is called when the first tokens of a generation have come.
    """
    if isinstance(plan, CallPlan):
        return await whole_answer(ask.context, ask.trace, plan, begun)
    return await plan.run(ask.context, ask.trace)


async def call(request: web.Request) -> web.StreamResponse:
    """POST to one of the paths: read the call, plan it, run the plan and send the answer."""
    plan, context = await _planned(request), request.app[CONTEXT]
    if isinstance(plan, CallPlan):
        return await answer(request, context, plan)
    if isinstance(plan, AwayPlan) and plan.is_streaming:
        return await plan.stream(request, context)
    return (await plan.run(context, request[TRACE])).response()


async def _planned(request: web.Request) -> Plan:
    """Read a call and plan it: nobody holds its body while it is answered."""
    endpoint = request.app[CALLS][request.path]
    return await endpoint.plan(await read_ask(request, is_keyed=endpoint.is_keyed))


def told(say: Callable[..., Awaitable[web.Response]]) -> Handler:
    """Return the handler of a question: `say` gets the context, and what the path names."""

    async def handle(request: web.Request) -> web.Response:
        return await say(request.app[CONTEXT], **request.match_info)

    return handle


def asked(say: Callable[[Question], Awaitable[web.Response]]) -> Handler:
    """Return the handler of a question that depends on the caller."""

    async def handle(request: web.Request) -> web.Response:
        return await say(question(request))

    return handle


def about(key: web.AppKey[_S], say: Callable[[_S, Question], Awaitable[web.Response]]) -> Handler:
    """Return the handler of a question about what the application has under this key."""

    async def handle(request: web.Request) -> web.Response:
        return await say(request.app[key], question(request))

    return handle


def question(request: web.Request) -> Question:
    """Return what is asked; its body is not read yet."""
    return Question(
        request.app[CONTEXT],
        request[TRACE],
        request.match_info,
        request.query,
        f"{request.scheme}://{request.host}",
        partial(read_object, request, request.app[CONTEXT].config),
        partial(read_parts, request, request.app[CONTEXT].config),
    )


def events(tell: Callable[[ApiContext], AsyncGenerator[bytes]]) -> Handler:
    """Return the handler of events that are no answer of a model.

    The stream begins with the first of them: before, `tell` may refuse.
    """

    async def handle(request: web.Request) -> web.StreamResponse:
        stream = SseStream(request[TRACE].way_out)
        async with aclosing(tell(request.app[CONTEXT])) as sent:
            async for event in sent:
                if not stream.is_open:
                    await stream.open(request, {})
                await stream.send([event])
        await stream.close()
        return stream.response

    return handle


def either(ours: Handler, theirs: Handler) -> Handler:
    """Return the handler of a path that clients of the Messages API expect `theirs` from."""

    async def handle(request: web.Request) -> web.StreamResponse:
        return await (theirs if speaks_messages(request) else ours)(request)

    return handle


def ordered(schema: type[_T], carry_out: Callable[[_T], Awaitable[Struct]]) -> Handler:
    """Return the handler of an order to the cluster, which is no call of a tenant's."""

    async def handle(request: web.Request) -> web.Response:
        return json_answer(
            await carry_out(await read_request(request, schema, request.app[CONTEXT].config))
        )

    return handle


def count(serve: Callable[[Ask], Awaitable[Struct]]) -> Handler:
    """Return the handler of a call that generates nothing.

    It is charged to the tenant as a request without tokens.
    """

    async def handle(request: web.Request) -> web.Response:
        context, trace = request.app[CONTEXT], request[TRACE]
        begin(context, trace)
        values = await read_object(request, context.config)
        return json_answer(await serve(Ask(values, request.headers, context, trace)))

    return handle


async def read_ask(request: web.Request, *, is_keyed: bool = True) -> Ask:
    """Admit the caller and read the body. Raises what these raise."""
    context = request.app[CONTEXT]
    trace = admit_keyed(request, context) if is_keyed else admit(request, context)
    values = await read_object(request, context.config)
    return Ask(values, request.headers, context, trace)
