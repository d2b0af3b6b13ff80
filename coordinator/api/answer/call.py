"""One running call: its generations, its choices and its measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from types import TracebackType
from typing import Final

import msgspec
from msgspec import UNSET

from coordinator.api.answer.arrivals import (
    NO_CHOICES,
    PIECE,
    Arrivals,
    ArrivedEvent,
    AtOnce,
    LongWork,
    RunAtOnce,
    one_by_one,
)
from coordinator.api.answer.bodies import (
    CompletionTokensDetails,
    PromptTokensDetails,
    TierUsage,
    Usage,
)
from coordinator.api.answer.choice import Choice, ChoiceDelta
from coordinator.api.answer.formats import AnswerFormat, AnswerHead
from coordinator.api.answer.sse import KEEP_ALIVE, SseStream
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.plan.generations import check_amounts
from coordinator.api.plan.sampling import TextOptions
from coordinator.api.server import callers
from coordinator.generation import Generation, GenerationRequest, Route
from coordinator.models.model import Model
from coordinator.text.parts import AnswerParts
from pdserve._native import TextStream, TokenRun
from pdserve.protocol import PromptLogprobs

_FEW: Final = 64  # tokens, which no other call notices


class CallPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Everything needed to answer a call, as its endpoint derived it from the request body."""

    model: Model
    requests: list[GenerationRequest]  # one per choice, grouped by prompt
    num_per_prompt: int = 1  # choices generated per prompt
    num_shown: int | None = None  # likeliest choices returned per prompt; None: all
    text: TextOptions
    format: AnswerFormat
    head: AnswerHead | None = None  # of answers that say which revision computes them
    is_streaming: bool
    counts_along: bool = False  # each event of a stream carries the token counts so far
    echoes_prompt: bool = False
    keep_alive: bytes = KEEP_ALIVE  # sent while a stream has no events
    saved: Callable[[], Awaitable[None]] | None = None  # waits until what its end stores is stored
    make_parts: Callable[[], AnswerParts] | None = None  # finds tool calls in an answer
    lost: tuple[int, ...] | None = None  # of a cascade: tokens of tiers asked before this one
    started: Sequence[Generation] = ()  # that run already, admitted and charged; else none do


class Call:
    """A running call. Use it as a context manager: leaving it cancels generations still running."""

    def __init__(self, context: ApiContext, trace: RequestTrace, plan: CallPlan) -> None:
        self._context = context
        self._observer = context.observer.of(plan.model.name)
        self._trace = trace
        self._plan = plan
        self._generations: list[Generation] = []  # one per choice, in order
        self._choices = [
            Choice(
                index,
                plan.model.tokenizer,
                plan.text,
                request.prompt.token_ids if plan.echoes_prompt else None,
            )
            for index, request in enumerate(plan.requests)
        ]
        # index of a prompt's first choice |-> its siblings' arrivals before the prompt's scores
        self._unscored: dict[int, list[ArrivedEvent]] = {
            index: []
            for index, request in enumerate(plan.requests)
            if request.sampling.prompt_logprobs is not None
        }
        self.long_work = LongWork(context.long_turns)
        self._one_by_one: Iterator[ArrivedEvent] = iter(())  # of a keyed stream
        self._num_unfinished = len(self._choices)
        self._cancelled: frozenset[int] = NO_CHOICES
        self._last_token_s: dict[int, float] = {}  # choice |-> arrival of its last token
        self._text: dict[int, TextStream] = {}  # choice |-> what writes its runs meanwhile
        self.text_s = 0.0  # arrival of the last token whose text was written so

    def __enter__(self) -> Call:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)

    def start(self) -> None:
        """Start all generations of the plan.

        If one is refused, the others are cancelled and the refusal is raised.
        """
        self._trace.release_body()  # all that is needed of it is in the plan
        requests, num_per_prompt = self._plan.requests, self._plan.num_per_prompt
        self._trace.num_choices = len(requests)
        prompts = requests[::num_per_prompt]
        self._trace.num_prompt_tokens = sum(r.prompt.num_tokens for r in prompts)
        self._generations += self._plan.started
        if not self._generations:
            self._start(requests, num_per_prompt)
        self._arrivals = Arrivals(self._generations, self._context.clock, self._context.write_turns)

    def _start(self, requests: Sequence[GenerationRequest], num_per_prompt: int) -> None:
        generator, echoes = self._plan.model.generator, self._plan.echoes_prompt
        check_amounts(requests, num_per_prompt, generator.max_inflight, echoes=echoes)
        callers.take_prompt(self._context, self._trace)
        try:
            for first in range(0, len(requests), num_per_prompt):
                answers = requests[first : first + num_per_prompt]
                self._generations += generator.start_siblings(answers)
        finally:
            if len(self._generations) < len(self._plan.requests):
                self._account()
                self._cancel_rest("another prompt of the same call was refused")

    def close(self, error: BaseException | None) -> None:
        """Cancel generations that still run; `error` is what ended the call, if anything did.

        As this process ends, those of a call under a key are left to its nodes: its client may come
        back to another coordinator.
        """
        is_hung_up = isinstance(error, asyncio.CancelledError | ConnectionError)
        is_ours = is_hung_up and self._context.tasks.is_aborting
        self._arrivals.close()
        self._end_text()
        self._account()
        if is_ours and self._trace.keyed is not None:
            for index in self._unfinished():
                self._generations[index].leave()
        elif is_ours:
            self._cancel_rest("coordinator is shutting down")
        else:
            self._cancel_rest("client disconnected" if is_hung_up else "the call failed")

    @property
    def is_finished(self) -> bool:
        """Whether every choice is finished."""
        return self._num_unfinished == 0

    @property
    def num_choices(self) -> int:
        """The number of choices generated."""
        return len(self._choices)

    @property
    def num_tokens(self) -> int:
        """The number of output tokens so far, of all choices."""
        return self._trace.num_completion_tokens

    @property
    def headers(self) -> dict[str, str]:
        """Response headers that name the nodes serving the call, as known now."""
        routes = [generation.route for generation in self._generations]
        return answer_headers(routes)

    def name_revision(self) -> None:
        """Have the answer say which revision serves it, once that is known."""
        head = self._plan.head
        if head is not None and not head.revision:
            head.revision = next((g.route.revision for g in self._generations), "")

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        trace = self._trace
        usage = self._usage(trace.num_completion_tokens)
        if trace.num_accepted or trace.num_refused or self._plan.requests[0].prediction:
            usage.completion_tokens_details = CompletionTokensDetails(
                accepted_prediction_tokens=trace.num_accepted,
                rejected_prediction_tokens=trace.num_refused,
            )
        return usage

    @property
    def prompt_usage(self) -> Usage:
        """Token counts before the first output token."""
        return self._usage(0)

    def _usage(self, num_completion_tokens: int) -> Usage:
        trace = self._trace
        usage = Usage(
            prompt_tokens=trace.num_prompt_tokens,
            completion_tokens=num_completion_tokens,
            total_tokens=trace.num_prompt_tokens + num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                trace.num_cached_tokens, trace.num_decode_precision or UNSET
            ),
        )
        if self._plan.lost is not None:
            model, counts = self._plan.model, (trace.num_prompt_tokens, trace.num_cached_tokens)
            own = TierUsage.of(model.name, model.price, *counts, num_completion_tokens)
            usage.tiers = [*trace.tiers, own]
        return usage

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for token events and process them; return False when none came within `timeout_s`.

        Raises what the generations raise.
        """
        arrivals = await self._next(timeout_s)
        for arrival in arrivals:
            await self._take_in(arrival)
        return bool(arrivals)

    def take_at_once(self, ready: list[ArrivedEvent]) -> bool:
        """Process pending events if none needs more than its text, and return whether it did."""
        num_tokens = 0
        self._end_text()
        for arrival in ready:
            event = arrival.event
            if event.index == 0 or event.finish_reason is not None:
                return False
            num_tokens += len(event.token_ids)
        if num_tokens > _FEW or self._unscored:
            return False
        for arrival in ready:
            choice = self._choices[arrival.index]
            if not choice.is_finished:
                self._push(choice, arrival)
        ready.clear()
        return True

    def at_once(self, take: AtOnce, take_run: RunAtOnce) -> None:
        """Have these called with what is pending while `wait` waits. See Arrivals."""
        self._arrivals.at_once, self._arrivals.run_at_once = take, take_run

    def write_run(self, stream: SseStream, index: int, run: TokenRun) -> bool:
        """Write what a choice's run has, if that is no more than text; see Arrivals."""
        text = self._text.get(index) or self._begin_text(stream, index)
        return text is not None and text.write(run)

    def _begin_text(self, stream: SseStream, index: int) -> TextStream | None:
        plan, decoder = self._plan, self._choices[index].text_decoder
        template = None if plan.counts_along else plan.format.text_template(index)
        if decoder is None or template is None:
            return None
        gaps, last_s = self._observer.gaps, self._last_token_s[index]
        text = stream.text_stream(template, decoder, gaps, _FEW, last_s)
        if text is not None:
            self._text[index] = text
        return text

    def _end_text(self) -> None:
        """Note what was written of runs, before anything else is."""
        trace = self._trace
        for index, text in self._text.items():
            written = text.written
            self._choices[index].ran_on(written.tokens, written.chars)
            self._last_token_s[index] = written.last_s
            trace.num_completion_tokens += written.tokens
            trace.last_token_s = max(trace.last_token_s or 0.0, written.last_s)
            self.text_s = max(self.text_s, written.text_s)
        self._text.clear()

    async def _next(self, timeout_s: float | None) -> Sequence[ArrivedEvent]:
        """Return what has arrived. Of a keyed stream only the next token: its events are to be the
        same whenever it is made, and whatever arrives together then.
        """
        if (following := next(self._one_by_one, None)) is not None:
            return [following]
        arrivals = await self._arrivals.take(timeout_s)
        self._end_text()
        self.long_work.restart()
        if self._trace.keyed is None or not self._plan.is_streaming:
            return arrivals
        self._one_by_one = chain.from_iterable(map(one_by_one, arrivals))
        return list(islice(self._one_by_one, 1))

    def take(self) -> Iterator[ChoiceDelta]:
        """Yield the new content of every choice; there may be several deltas of one choice."""
        for choice in self._shown():
            while (delta := choice.take()) is not None:
                yield delta

    def _account(self) -> None:
        """Count the tokens of the prompts that were sent to nodes; others wait in line."""
        step = self._plan.num_per_prompt
        self._trace.num_dispatched_tokens = sum(
            request.prompt.num_tokens
            for request, first in zip(
                self._plan.requests[::step], self._generations[::step], strict=False
            )
            if first.route.was_dispatched
        )

    def _shown(self) -> list[Choice]:
        """Return the choices to show: all, or with `num_shown` each prompt's likeliest, renumbered.

        Calls with `num_shown` are not streamed, so that all choices are finished here.
        """
        num_shown, num_per_prompt = self._plan.num_shown, self._plan.num_per_prompt
        if num_shown is None:
            return self._choices
        shown: list[Choice] = []
        for first in range(0, len(self._choices), num_per_prompt):
            of_prompt = self._choices[first : first + num_per_prompt]
            shown += sorted(of_prompt, key=lambda choice: -choice.mean_logprob)[:num_shown]
        for index, choice in enumerate(shown):
            choice.index = index
        return shown

    async def _take_in(self, arrival: ArrivedEvent) -> None:
        choice = self._choices[arrival.index]
        if choice.is_finished:
            return
        first = arrival.index - arrival.index % self._plan.num_per_prompt
        if arrival.index == first and arrival.event.index == 0:
            await self._take_prompt(arrival)
        elif arrival.index != first and first in self._unscored:
            self._unscored[first].append(arrival)
            return
        while choice.echo(PIECE):
            await self.long_work.did(PIECE)
        await self.long_work.did(self._push(choice, arrival))

    def _push(self, choice: Choice, arrival: ArrivedEvent) -> int:
        """Have a choice take in an event; return the number of its new tokens."""
        trace, before = self._trace, choice.num_tokens
        choice.push(arrival.event)
        num_new = choice.num_tokens - before
        self._measure(arrival, num_new)
        trace.num_refused += arrival.event.refused
        misfits = arrival.event.decode_precision_tokens
        trace.num_decode_precision = max(trace.num_decode_precision, misfits)
        if arrival.event.accepted:  # the last ones, which a stop string may have cut
            num_drawn = len(arrival.event.token_ids) - arrival.event.accepted
            trace.num_accepted += max(0, num_new - num_drawn)
        if trace.first_token_s is None and choice.has_shown_text:
            trace.first_token_s = arrival.at_s
            self._observer.first_token(arrival.at_s - trace.received_s)
        if choice.is_finished:
            self._finished(choice, arrival.index)
        return num_new

    async def _take_prompt(self, arrival: ArrivedEvent) -> None:
        """Process a prompt's cached tokens and scores, once its prefill is done.

        They come with the first event of the prompt's first choice, on behalf of all its choices.
        """
        first, event = arrival.index, arrival.event
        self._trace.num_cached_tokens += event.cached_tokens
        early = self._unscored.pop(first, None)
        if early is not None:
            for choice in self._choices[first : first + self._plan.num_per_prompt]:
                choice.score_prompt(event.prompt_logprobs or PromptLogprobs())
            for of_sibling in early:
                await self._take_in(of_sibling)

    def _finished(self, choice: Choice, index: int) -> None:
        self._num_unfinished -= 1
        self._trace.finish_reason = self._choices[0].finish_reason
        if choice.ended_by_string:
            self._arrivals.stop(index)
            self._cancel(index, "stop string")

    def _measure(self, arrival: ArrivedEvent, num_new_tokens: int) -> None:
        """Report the ITL of each new token.

        Tokens of one event arrived together, so only the first of them has a nonzero gap.
        """
        last_s = self._last_token_s.get(arrival.index)
        for _ in range(num_new_tokens):
            if last_s is not None:
                self._observer.inter_token(arrival.at_s - last_s)
            last_s = arrival.at_s
        if last_s is not None:
            self._last_token_s[arrival.index] = self._trace.last_token_s = last_s
        self._trace.num_completion_tokens += num_new_tokens

    def _cancel(self, index: int, reason: str) -> None:
        self._generations[index].cancel(reason)
        self._cancelled |= {index}

    def _cancel_rest(self, reason: str) -> None:
        for index in self._unfinished():
            self._cancel(index, reason)

    def _unfinished(self) -> list[int]:
        """Every generation that was started, and neither has ended by itself nor was cancelled."""
        return [
            index
            for index, choice in enumerate(self._choices[: len(self._generations)])
            if (not choice.is_finished or choice.ended_by_string) and index not in self._cancelled
        ]


def answer_headers(routes: Sequence[Route]) -> dict[str, str]:
    """Return headers that name the nodes; no prefill node when the decode node prefills locally."""
    named = {
        "x-pdserve-prefill-node": _joined(route.prefill_node for route in routes),
        "x-pdserve-decode-node": _joined(route.decode_node for route in routes),
    }
    return {k: v for k, v in named.items() if v}


def _joined(names: Iterable[str | None]) -> str:
    """Join the names with commas, each once, in order."""
    return ",".join(dict.fromkeys(name for name in names if name is not None))
