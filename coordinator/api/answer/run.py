"""Runs a call's plan and sends the response, streamed or whole."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from aiohttp import web

from coordinator.api.answer.arrivals import PIECE, SCORED, ArrivedEvent
from coordinator.api.answer.call import Call, CallPlan
from coordinator.api.answer.choice import ChoiceDelta
from coordinator.api.answer.sse import EventIds, SseStream
from coordinator.api.context import TRACE, ApiContext, RequestTrace
from pdserve.shared.clock import Clock
from pdserve.shared.errors import PdserveError


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
        ids = EventIds(len(plan.requests), trace.keyed.seen, plan.lost)
    if not plan.is_streaming:
        return (await whole_answer(context, trace, plan)).response()
    with Call(context, trace, plan) as call:
        trace.stream = SseStream(trace.way_out, plan.keep_alive)
        trace.format = plan.format
        streaming = _Streaming(call, plan, trace.stream, ids, context.clock)
        await streaming.run(request, context.config.keep_alive_s)
        return trace.stream.response


async def whole_answer(
    context: ApiContext,
    trace: RequestTrace,
    plan: CallPlan,
    begun: Callable[[], None] = lambda: None,
) -> WholeAnswer:
    """Run the plan's generations to their end. Raises what they raise.

    `begun` is called when its first tokens have come, and may be more often.
    """
    with Call(context, trace, plan) as call:
        return await _whole(call, plan, begun)


async def _whole(call: Call, plan: CallPlan, begun: Callable[[], None]) -> WholeAnswer:
    num_taken = 0
    while not call.is_finished:
        await call.wait()
        begun()
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


class _Streaming:
    """Sends the output of one call as events, most of them without waking the call's task."""

    def __init__(
        self, call: Call, plan: CallPlan, stream: SseStream, ids: EventIds | None, clock: Clock
    ) -> None:
        self._call = call
        self._plan = plan
        self._stream = stream
        self._ids = ids
        self._clock = clock
        self._made: list[bytes] = []  # at once, but too long to be sent at once
        self._sent_s = clock.now()

    async def run(self, request: web.Request, keep_alive_s: float) -> None:
        """Send everything to the end. Raises what the generations raise."""
        call, clock, stream = self._call, self._clock, self._stream
        if self._ids is None:  # events with ids are made token by token
            call.at_once(self._send_at_once, partial(call.write_run, stream))
        while not call.is_finished:
            try:
                await call.wait(max(0.0, self._sent_s + keep_alive_s - clock.now()))
            except PdserveError:
                if self._made:  # they came before
                    await stream.send(self._made)
                raise
            self._sent_s = max(self._sent_s, call.text_s)
            if is_first := not stream.is_open:
                await stream.open(request, call.headers)
            made, self._made = self._made, []
            if await send_new(
                call,
                self._plan,
                stream.send,
                self._ids,
                is_first=is_first,
                made=made,
                send_last=stream.send_last,
            ):
                self._sent_s = clock.now()
            elif clock.now() >= self._sent_s + keep_alive_s:  # tokens may come without any text
                await stream.keep_alive()
                self._sent_s = clock.now()

    def _send_at_once(self, ready: list[ArrivedEvent]) -> bool:
        """See Arrivals: what a client that reads is to see of tokens that end nothing."""
        call, plan = self._call, self._plan
        if not (self._stream.is_read and call.take_at_once(ready)) or call.is_finished:
            return False
        usage = call.usage if plan.counts_along else None
        made = [event for delta in call.take() for event in plan.format.chunk(delta, usage)]
        if not made:
            return True
        if not self._stream.send_at_once(made):
            self._made = made
            return False
        self._sent_s = self._clock.now()
        return True


async def send_new(
    call: Call,
    plan: CallPlan,
    send: Callable[[list[bytes]], Awaitable[None]],
    ids: EventIds | None = None,
    *,
    is_first: bool,
    made: Sequence[bytes] = (),
    send_last: Callable[[list[bytes]], Awaitable[None]] | None = None,
) -> bool:
    """Send the events that were not sent before, and return whether there were any.

    The last ones of a call are sent by `send_last`, if it is given, even if there are none.
    `is_first` adds the opening events; those `made` already come before all others. Events of many
    tokens are sent while they are made. With `ids` they get ids, and those that the client has are
    left out.
    """
    events = [*made]
    sent = num_made = 0
    call.name_revision()

    def add(choice: int, more: Sequence[bytes]) -> None:
        events.extend(more if ids is None else ids.unseen(choice, more))

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
    if call.is_finished and send_last is not None:
        await send_last(events)
    elif events:
        await send(events)
    return bool(sent or events)


def _amount(delta: ChoiceDelta) -> int:
    """Return how much work it is to encode a delta."""
    return 1 + SCORED * (len(delta.tokens) + len(delta.prompt_logprobs))
