"""An answer of a server elsewhere: passed on as it says it, under this call's id and tier's name.

It is not resumed: its events have no ids, and nobody else could go on with them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import msgspec
from aiohttp import web

from coordinator.api.answer.bodies import ErrorDetail, TierUsage
from coordinator.api.answer.formats import UsageShown, error_event, usage_shown
from coordinator.api.answer.run import WholeAnswer
from coordinator.api.answer.sse import DONE, SseStream, framed
from coordinator.api.context import TRACE, ApiContext, RequestTrace
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.fields import GenerationFields
from coordinator.api.read.terms import service_terms
from coordinator.api.server import callers
from coordinator.api.tiers.sent import sent_body
from coordinator.external.endpoint import Endpoint
from coordinator.external.events import Counts, content_of
from coordinator.external.reply import Reply

_BYTES_PER_TOKEN: Final = 4  # about, of text: for a prompt before its tokens are known
_PREFIXES: Final = {"/chat/completions": "chatcmpl", "/completions": "cmpl"}


def plan_away(
    schema: type[GenerationFields], ask: Ask, endpoint: Endpoint, told: Callable[[str], None]
) -> AwayPlan:
    """Plan a call for a server elsewhere. Raises RequestError."""
    body, trace = convert_request(ask.values, schema), ask.trace
    terms = service_terms(body, ask.headers, ask.context, trace)
    shows_usage = usage_shown(body) is not UsageShown.NOWHERE
    assert trace.endpoint is not None, "it is a call"
    path = trace.endpoint.removeprefix("/v1")
    sent = sent_body(ask.values, path, endpoint.name)
    prompts = sent.get("prompt")
    return AwayPlan(
        endpoint=endpoint,
        path=path,
        body=sent,
        num_choices=(body.n or 1) * (len(prompts) if isinstance(prompts, list) else 1),
        shows_usage=shows_usage,
        deadline_s=terms.deadline_s(ask.context.clock.now()),
        told=told,
    )


class _Failure:
    """The end of a stream that has failed, as OpenAI's clients read it."""

    def failure(self, error: ErrorDetail) -> bytes:
        """See AnswerFormat."""
        return error_event(error)


class AwayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A planned call that a server elsewhere answers."""

    endpoint: Endpoint
    path: str
    body: dict[str, Any]  # as it is sent
    num_choices: int
    shows_usage: bool  # of a stream
    deadline_s: float  # from its start; 0: none
    told: Callable[[str], None]  # is told the outcome

    @property
    def is_streaming(self) -> bool:
        """Whether it is answered in events."""
        return bool(self.body.get("stream"))

    async def run(self, context: ApiContext, trace: RequestTrace) -> WholeAnswer:
        """Return the answer in one piece. Raises what `Endpoint.asked` raises."""
        async with self._asked(context, trace) as reply:
            (said,) = [event async for event in reply.events() if event is not None]
        self._take_in(said, reply.counts, context, trace)
        return WholeAnswer(msgspec.json.encode(self._shown(said, trace)), {})

    async def stream(self, request: web.Request, context: ApiContext) -> web.StreamResponse:
        """Send the answer as it comes. Raises what `Endpoint.asked` raises."""
        trace = request[TRACE]
        stream = trace.stream = SseStream(trace.way_out)
        trace.format = _Failure()
        async with self._asked(context, trace) as reply:
            async for event in reply.events():
                if not stream.is_open:
                    await stream.open(request, {})
                if event is None:
                    await stream.keep_alive()
                    continue
                self._take_in(event, reply.counts, context, trace)
                shown = self._shown(event, trace)
                if shown["choices"] or "usage" in shown:
                    await stream.send([framed(msgspec.json.encode(shown))])
        await stream.send([DONE])
        await stream.close()
        return stream.response

    @asynccontextmanager
    async def _asked(self, context: ApiContext, trace: RequestTrace) -> AsyncIterator[Reply]:
        """Charge the prompt by its length, ask, and tell how it went."""
        trace.is_elsewhere = True
        trace.is_streaming, trace.num_choices = self.is_streaming, self.num_choices
        size = len(msgspec.json.encode(self.body.get("messages", self.body.get("prompt"))))
        trace.num_prompt_tokens = size // _BYTES_PER_TOKEN
        callers.take_prompt(context, trace)
        trace.release_body()
        outcome = "failed"
        try:
            asked = self.endpoint.asked(
                self.path, self.body, self.num_choices, self.deadline_s, trace.owner
            )
            async with asked as reply:
                trace.num_dispatched_tokens = trace.num_prompt_tokens
                yield reply
            outcome = "answered"
        finally:
            self.told(outcome)

    def _take_in(
        self,
        said: dict[str, Any],
        counts: Counts | None,
        context: ApiContext,
        trace: RequestTrace,
    ) -> None:
        """Measure and count an event; until it says the number of tokens, each is taken for one."""
        now_s, observer = context.clock.now(), context.observer
        if any(_has_text(choice) for choice in said["choices"]):
            if trace.first_token_s is None:
                trace.first_token_s = now_s
                observer.first_token(now_s - trace.received_s)
            trace.last_token_s = now_s
            trace.num_completion_tokens += 1
        for choice in said["choices"]:
            if choice["index"] == 0 and choice.get("finish_reason") is not None:
                trace.finish_reason = str(choice["finish_reason"])
        if counts is not None:
            trace.num_prompt_tokens = trace.num_dispatched_tokens = counts.prompt
            trace.num_cached_tokens = counts.cached
            trace.num_completion_tokens = counts.completion

    def _shown(self, said: dict[str, Any], trace: RequestTrace) -> dict[str, Any]:
        """Return what the client sees of an answer, or of an event."""
        shown = said | {
            "id": f"{_PREFIXES[self.path]}-{trace.unique}",
            "model": self.endpoint.name,
        }
        usage = shown.pop("usage", None)
        if usage is not None and (self.shows_usage or not self.is_streaming):
            own = TierUsage.of(
                self.endpoint.name,
                self.endpoint.price,
                trace.num_prompt_tokens,
                trace.num_cached_tokens,
                trace.num_completion_tokens,
            )
            shown["usage"] = usage | {"tiers": [*trace.tiers, own]}
        return shown


def _has_text(choice: dict[str, Any]) -> bool:
    said = content_of(choice)
    said = choice if said is None else said
    return any(value for name, value in said.items() if name not in _NO_TEXT)


_NO_TEXT: Final = frozenset(("role", "index", "finish_reason", "logprobs", "refusal"))
