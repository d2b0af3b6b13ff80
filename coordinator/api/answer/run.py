"""Runs a call's plan and sends the response, streamed or whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from coordinator.api.answer.arrivals import PIECE, SCORED
from coordinator.api.answer.call import Call, CallPlan
from coordinator.api.answer.choice import ChoiceDelta
from coordinator.api.answer.sse import EventIds, SseStream
from coordinator.api.context import CONTEXT, TRACE, ApiContext, RequestTrace, outbox_of


@dataclass(frozen=True, slots=True)
class WholeAnswer:
    """An answer in one piece."""

    body: bytes  # JSON
    headers: dict[str, str]  # that name the nodes

    def response(self) -> web.Response:
        """Return it for HTTP."""
        return web.Response(body=self.body, content_type="application/json", headers=self.headers)


async def answer(request: web.Request, context: ApiContext, plan: CallPlan) -> web.StreamResponse:
    """Run the plan's generations and send their output. Raises what the generations raise."""
    trace = request[TRACE]
    trace.is_streaming = plan.is_streaming
    ids = None
    if trace.keyed is not None and plan.is_streaming:
        ids = EventIds(len(plan.requests), trace.keyed.seen)
    if not plan.is_streaming:
        return (await whole_answer(context, trace, plan)).response()
    with Call(context, trace, plan) as call:
        trace.stream = SseStream(outbox_of(request))
        trace.format = plan.format
        return await _streamed(request, call, plan, trace.stream, ids)


async def whole_answer(context: ApiContext, trace: RequestTrace, plan: CallPlan) -> WholeAnswer:
    """Run the plan's generations to their end. Raises what they raise."""
    with Call(context, trace, plan) as call:
        return await _whole(call, plan)


async def _whole(call: Call, plan: CallPlan) -> WholeAnswer:
    num_taken = 0
    while not call.is_finished:
        await call.wait()
        is_ranked = plan.num_shown is not None  # only at the end is it known what is shown
        if call.is_finished or (not is_ranked and call.num_tokens - num_taken >= PIECE):
            num_taken = call.num_tokens
            for delta in call.take():
                plan.format.take_in(delta)
                await call.long_work.did(_amount(delta))
    call.name_revision()
    body = plan.format.whole(call.usage)
    if plan.saved is not None:
        await plan.saved()
    return WholeAnswer(body, call.headers)


async def _streamed(
    request: web.Request, call: Call, plan: CallPlan, stream: SseStream, ids: EventIds | None
) -> web.StreamResponse:
    context = request.app[CONTEXT]
    clock, sent_s = context.clock, context.clock.now()
    keep_alive_s = context.config.keep_alive_s
    while not call.is_finished:
        await call.wait(max(0.0, sent_s + keep_alive_s - clock.now()))
        if await _send(request, call, plan, stream, ids):
            sent_s = clock.now()
        elif clock.now() >= sent_s + keep_alive_s:  # tokens may arrive without showable text
            await stream.keep_alive()
            sent_s = clock.now()
    await stream.close()
    return stream.response


async def _send(
    request: web.Request, call: Call, plan: CallPlan, stream: SseStream, ids: EventIds | None
) -> bool:
    """Send all new events, few in one write; return whether there were any."""
    is_first = not stream.is_open
    if is_first:
        await stream.open(request, call.headers)
    return await send_new(call, plan, stream.send, ids, is_first=is_first)


async def send_new(
    call: Call,
    plan: CallPlan,
    send: Callable[[list[bytes]], Awaitable[None]],
    ids: EventIds | None = None,
    *,
    is_first: bool,
) -> bool:
    """Send the events that were not sent before, and return whether there were any.

    `is_first` adds the opening events. Events of many tokens are sent while they are made. With
    `ids` they get ids, and those that the client has are left out.
    """
    events: list[bytes] = []
    sent = num_made = 0
    call.name_revision()

    def add(choice: int, made: Sequence[bytes]) -> None:
        events.extend(made if ids is None else ids.unseen(choice, made))

    if is_first:
        usage = call.prompt_usage if plan.counts_along else None
        for index in range(call.num_choices):
            add(index, plan.format.opening(index, usage))
    usage = call.usage if plan.counts_along else None
    for delta in call.take():
        add(delta.index, plan.format.chunk(delta, usage))
        num_made += _amount(delta)
        await call.long_work.did(_amount(delta))
        if num_made >= PIECE:
            sent, num_made = sent + len(events), 0
            await send(events)
            events = []
    if call.is_finished:
        add(0, plan.format.closing(call.usage))  # all choices are over: the order is certain
        if plan.saved is not None:
            await plan.saved()
    if events:
        await send(events)
    return bool(sent or events)


def _amount(delta: ChoiceDelta) -> int:
    """Return how much work it is to encode a delta."""
    return 1 + SCORED * (len(delta.tokens) + len(delta.prompt_logprobs))
