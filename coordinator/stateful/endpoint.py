"""POST /v1/responses, and POST /v1/responses/input_tokens, which counts its prompt tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from aiohttp import web

from coordinator.api.answer.bodies import json_answer
from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.run import answer
from coordinator.api.calls import Endpoint, in_tiers, read_ask
from coordinator.api.context import CONTEXT, TRACE
from coordinator.api.prompt.chat import encode_chat
from coordinator.api.prompt.fit import num_left
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import read_object
from coordinator.api.responses.chat_request import in_our_words
from coordinator.api.responses.items import KeptItem
from coordinator.api.responses.objects import InputTokens
from coordinator.api.server import callers
from coordinator.api.tokens import counting
from coordinator.stateful.asked import read_asked
from coordinator.stateful.background import BackgroundRun
from coordinator.stateful.compact import plan_compaction
from coordinator.stateful.follow import follow
from coordinator.stateful.plan import Planned, as_fitted, plan_asked
from coordinator.stateful.storage.store import STORE, ResponseStore

CREATE, COMPACT = "/v1/responses", "/v1/responses/compact"
_JSON = "application/json"


def endpoints(store: ResponseStore) -> dict[str, Endpoint]:
    """The calls that go on from what is in `store`, by their paths."""

    async def plan(ask: Ask) -> CallPlan:
        return (await _plan(ask, store))[0].call

    compact = Endpoint(in_tiers(partial(plan_compaction, store=store)), is_keyed=False)
    return {CREATE: Endpoint(plan), COMPACT: compact}


async def create_response(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses: answer a new or a continued conversation."""
    planned, is_background = await _plan(await read_ask(request), request.app[STORE])
    if is_background:
        return await _in_background(request, planned)
    return await answer(request, request.app[CONTEXT], planned.call)


async def _plan(ask: Ask, store: ResponseStore) -> tuple[Planned, bool]:
    """Plan the call, which keeps nothing of the body besides the items.

    Also returns whether it is to run in the background. Raises RequestError.
    """
    planned = await plan_asked(ask, partial(read_asked, store=store))
    return planned, ask.values.get("background") is True


async def count_input_tokens(request: web.Request) -> web.Response:
    """Count the prompt tokens of a request; nothing is generated or stored.

    It is charged to the tenant as a request without tokens.
    """
    context, trace = request.app[CONTEXT], request[TRACE]
    callers.begin(context, trace)
    ask = Ask(await read_object(request, context.config), request.headers, context, trace)
    asked = await read_asked(ask, request.app[STORE])
    asker = counting(trace)

    async def count(items: Sequence[KeptItem]) -> int:
        num_tokens = len(await encode_chat(asked.chat(items), asked.model, asker))
        if asked.body.truncation == "auto":
            limit = asked.body.max_output_tokens
            num_left(num_tokens, limit, asked.model.max_model_len())
        return num_tokens

    with in_our_words():
        num_tokens = await as_fitted(asked, count)
    return json_answer(InputTokens(input_tokens=num_tokens))


async def _in_background(request: web.Request, planned: Planned) -> web.StreamResponse:
    """Start a background run; return the queued response, or the stream of its events."""
    context, trace = request.app[CONTEXT], request[TRACE]

    def take_over() -> None:
        request[TRACE] = trace.without_call()

    trace.is_streaming = planned.call.is_streaming
    store = request.app[STORE]
    body = BackgroundRun(context, store, trace, planned, take_over).begin()
    await store.saved()
    if planned.stored.log is not None:
        return await follow(request, planned.stored.log, 0)
    return web.Response(body=body, content_type=_JSON)
