"""A tier's attempt at an answer: kept back until it is known whether the client is to have it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeAlias

from msgspec import structs

from coordinator.api.answer.bodies import TierUsage
from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.choice import Choice
from coordinator.api.tiers.judge import KEPT, Judge
from coordinator.generation import Generation, GenerationRequest, Listener, Route
from coordinator.models.cascade import Hook
from pdserve._native import TokenRun
from pdserve.protocol import TokenEvent, TokenLogprobs
from pdserve.settings.cascades import Escalation
from pdserve.shared.errors import InvalidRequest

_OnEvent: TypeAlias = Callable[[TokenEvent | Exception], None]
_OF_MARGIN: Final = 2  # likeliest tokens


class HeldGeneration:
    """A running generation whose events wait for its listener. See Generation."""

    def __init__(self, generation: Generation, num_shown: int | None, on_event: _OnEvent) -> None:
        """
        Args:
            num_shown: log-probabilities per token that the call asks for; None: none. The
                generation may have more.
            on_event: is told of each event first, as it comes from the generation.
        """
        self._generation = generation
        self._num_shown = num_shown
        self._on_event = on_event
        self._held: list[TokenEvent | Exception] = []
        self._listener: Listener = self._held.append
        generation.listen(self._arrived)

    @property
    def route(self) -> Route:
        """See Generation."""
        return self._generation.route

    def listen(
        self, listener: Listener, on_tokens: Callable[[TokenRun], None] | None = None
    ) -> None:
        """See Generation; each token is an event, as it is judged."""
        self._listener = listener
        for event in self._held:
            listener(event)
        self._held.clear()

    def cancel(self, reason: str) -> None:
        """See Generation."""
        self._generation.cancel(reason)

    def leave(self) -> None:
        """See Generation."""
        self._generation.leave()

    def _arrived(self, event: TokenEvent | Exception) -> None:
        self._on_event(event)
        if isinstance(event, TokenEvent) and event.logprobs:
            event = structs.replace(event, logprobs=self._shown(event.logprobs))
        self._listener(event)

    def _shown(self, logprobs: list[TokenLogprobs]) -> list[TokenLogprobs]:
        num = self._num_shown
        if num is None:
            return []
        if all(len(one.top_ids) <= num for one in logprobs):
            return logprobs
        return [
            structs.replace(one, top_ids=one.top_ids[:num], top_logprobs=one.top_logprobs[:num])
            for one in logprobs
        ]


class Attempt:
    """The answers of one tier to a call, which run from now on."""

    def __init__(
        self, plan: CallPlan, rule: Escalation, hook: Hook | None, *, offers_tools: bool
    ) -> None:
        """Start them. Raises what `Generator.start_siblings` raises.

        `plan` is as for the tier alone, `hook` that of the rule.
        """
        self._plan = plan
        self._num_cached_tokens = 0
        self._verdict: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._judges = [
            Judge(
                rule,
                Choice(index, plan.model.tokenizer, plan.text),
                has_grammar=bool(request.sampling.grammar),
                parts=plan.make_parts() if plan.make_parts and offers_tools else None,
                hook=partial(self._ask, hook, request) if hook is not None else None,
            )
            for index, request in enumerate(plan.requests)
        ]
        self.generations: list[HeldGeneration] = []
        try:
            self._start([judged(request, rule) for request in plan.requests])
        except BaseException:
            self.cancel("another prompt of the same call was refused")
            raise

    @property
    def use(self) -> TierUsage:
        """What it has used so far."""
        step = self._plan.num_per_prompt
        prompts = zip(self._plan.requests[::step], self.generations[::step], strict=True)
        model = self._plan.model
        return TierUsage.of(
            model.name,
            model.price,
            sum(r.prompt.num_tokens for r, g in prompts if g.route.was_dispatched),
            self._num_cached_tokens,
            sum(judge.num_tokens for judge in self._judges),
        )

    @property
    def text(self) -> str:
        """The text of its first answer so far; from then on it begins anew."""
        return self._judges[0].take_text()

    async def verdict(self) -> str:
        """Return why the next tier is to be asked, once that is known; KEPT: it is not.

        Raises what the generations raise.
        """
        return await self._verdict

    def keep(self) -> None:
        """Judge it no longer: another coordinator has."""
        if not self._verdict.done():
            self._verdict.set_result(KEPT)

    def cancel(self, reason: str) -> None:
        """Stop what still runs."""
        self._verdict.cancel()
        for generation in self.generations:
            generation.cancel(reason)

    def _start(self, requests: Sequence[GenerationRequest]) -> None:
        generator, step = self._plan.model.generator, self._plan.num_per_prompt
        for first in range(0, len(requests), step):
            started = generator.start_siblings(requests[first : first + step])
            for index, generation in enumerate(started, first):
                num_shown = self._plan.requests[index].sampling.logprobs
                on_event = partial(self._arrived, index)
                self.generations.append(HeldGeneration(generation, num_shown, on_event))

    def _arrived(self, index: int, event: TokenEvent | Exception) -> None:
        if self._verdict.done():
            return
        if isinstance(event, Exception):
            self._verdict.set_exception(event)
            return
        try:
            reason = self._judge(index, event)
        except Exception as error:  # noqa: BLE001 - whatever it is, who waits for the verdict raises it
            self._verdict.set_exception(error)
            return
        if reason or all(judge.is_content for judge in self._judges):
            self._verdict.set_result(reason)

    def _ask(self, hook: Hook, request: GenerationRequest, answer: str) -> bool:
        prompt = self._plan.model.tokenizer.decode(request.prompt.token_ids)
        return hook.escalates(prompt, answer)

    def _judge(self, index: int, event: TokenEvent) -> str:
        if event.index == 0 and index % self._plan.num_per_prompt == 0:
            self._num_cached_tokens += event.cached_tokens
        return self._judges[index].push(event)


def judged(request: GenerationRequest, rule: Escalation) -> GenerationRequest:
    """Return a request with the log-probabilities that a rule looks at. Raises InvalidRequest."""
    if not rule.judges_confidence:
        return request
    if rule.margin is not None and request.sampling.logprob_token_ids:
        raise InvalidRequest(
            "'logprob_token_ids' cannot be listed by a cascade that looks at the likeliest tokens: "
            "name one of its tiers",
            "logprob_token_ids",
        )
    least = 0 if rule.margin is None else _OF_MARGIN
    num_logprobs = max(request.sampling.logprobs or 0, least)
    return structs.replace(
        request, sampling=structs.replace(request.sampling, logprobs=num_logprobs)
    )
