"""Asks one tier of a cascade after the other, and plans the answer of the one that is kept."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from msgspec import structs

from coordinator.api.answer.bodies import TierUsage
from coordinator.api.answer.call import CallPlan
from coordinator.api.plan.generations import check_amounts
from coordinator.api.read.ask import Ask
from coordinator.api.read.idempotency import LAST_EVENT_HEADER
from coordinator.api.server import callers
from coordinator.api.tiers.attempt import Attempt
from coordinator.external.endpoint import Endpoint
from coordinator.models.cascade import Cascade
from coordinator.text.threads import Asker
from pdserve.settings.cascades import Escalation, Tier
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest, PermissionDenied

T = TypeVar("T")
Plan: TypeAlias = Callable[[Ask], Awaitable[T]]

ANSWERED: Final = "answered"
_TOO_LONG: Final = "context"  # the prompt does not fit
_CLASSIFIED: Final = "classifier"  # it would be asked in vain


async def plan_in_tiers(
    ask: Ask,
    cascade: Cascade,
    plan: Plan[T],
    call_of: Callable[[T], CallPlan],
    with_call: Callable[[T, CallPlan], T],
    away: Callable[[Ask, Endpoint, Callable[[str], None]], T] | None = None,
) -> T:
    """Plan a call for a cascade: find the tier that answers it.

    Args:
        cascade: that the call is for (`Ask.cascade`).
        plan: plans a call for one model, and may be called for several.
        call_of: returns the call of what it returns; `with_call` returns that with another call.
        away: plans one for a server elsewhere, which tells its outcome; None: none may answer.

    Raises what `plan` raises, and what generations raise.
    """
    run = _Run(ask, cascade)
    _check_known(run.known, cascade)
    _check_leave(ask, cascade, can_leave=away is not None)
    *_, last = cascade.tiers
    for tier in cascade.tiers:
        if tier.external and away is not None:
            ask.trace.model = tier.name
            return away(ask, cascade.endpoints[tier.external], partial(run.tell, tier))
        try:
            made = await plan(structs.replace(ask, values=ask.values | {"model": tier.name}))
            found = await run.through(tier, call_of(made))
        except ContextLengthExceeded:
            if tier is last:
                raise
            run.skip(tier, _TOO_LONG)
            continue
        if found is not None:
            return with_call(made, found)
    raise AssertionError("the last tier answers")


def _check_known(known: Sequence[int] | None, cascade: Cascade) -> None:
    if known is not None and len(known) >= len(cascade.tiers):
        raise InvalidRequest(
            f"{LAST_EVENT_HEADER!r} is of no stream of {cascade.name!r}, which has "
            f"{len(cascade.tiers)} tiers",
            LAST_EVENT_HEADER,
        )


def _check_leave(ask: Ask, cascade: Cascade, *, can_leave: bool) -> None:
    """Check that a tier elsewhere may be asked, whoever answers. Raises RequestError."""
    *others, last = (tier.name for tier in cascade.tiers)
    if not cascade.endpoints:
        return
    instead = f"name another tier ({', '.join(others)})"
    tenant = ask.trace.tenant
    if not tenant.text_may_leave:
        raise PermissionDenied(
            f"{cascade.name!r} may ask {last!r}, which is elsewhere, and text of {tenant.name!r} "
            f"may not leave this cluster (text_may_leave): {instead}"
        )
    if not can_leave:
        raise InvalidRequest(
            f"{cascade.name!r} may ask {last!r}, which is elsewhere: use /v1/chat/completions or "
            f"/v1/completions, or {instead}",
            "model",
        )
    known = ask.trace.keyed and ask.trace.keyed.lost
    if known and len(known) == len(others):
        raise InvalidRequest(
            f"what {last!r} answers cannot be resumed: ask again, without {LAST_EVENT_HEADER!r}",
            LAST_EVENT_HEADER,
        )


@dataclass(slots=True)
class _Run:
    """One call on its way through the tiers."""

    ask: Ask
    cascade: Cascade
    lost: list[int] = field(default_factory=list)  # tokens of each tier that did not answer
    draft: str = ""  # what the tier before has said

    @property
    def known(self) -> Sequence[int] | None:
        """`lost`, of a stream that goes on; None: it is to be decided."""
        keyed = self.ask.trace.keyed
        return None if keyed is None else keyed.lost

    async def through(self, tier: Tier, call: CallPlan) -> CallPlan | None:
        """Return the call as this tier answers it; None: the next one is to be asked."""
        number = len(self.lost)
        call = await self._for_tier(number, call)
        if self.known is not None and number < len(self.known):
            self._lost_before(call, self.known[number])
            return None
        if tier.escalate is None:
            self.tell(tier, ANSWERED)
            return structs.replace(call, lost=tuple(self.lost))
        if self.known is None and self._is_in_vain(tier.escalate, call):
            self.skip(tier, _CLASSIFIED)
            return None
        if not tier.escalate.judges_answers:
            self.tell(tier, ANSWERED)
            return structs.replace(call, lost=tuple(self.lost))
        attempt = self._begin(tier.escalate, call)
        if self.known is not None:
            attempt.keep()
        try:
            reason = await attempt.verdict()
        except BaseException:
            attempt.cancel("the call has failed")
            self._count(attempt.use)
            raise
        if not reason:
            self.tell(tier, ANSWERED)
            return structs.replace(call, lost=tuple(self.lost), started=attempt.generations)
        attempt.cancel("another model answers")
        self._lose(attempt)
        self.skip(tier, reason, attempt.use.completion_tokens)
        return None

    def skip(self, tier: Tier, reason: str, num_tokens: int = 0) -> None:
        """Go on to the next tier, after so many tokens of this one."""
        self.lost.append(num_tokens)
        self.tell(tier, reason)

    def _is_in_vain(self, rule: Escalation, call: CallPlan) -> bool:
        """Return whether its classifier says so of one of the prompts."""
        classifier = self.cascade.classifiers.get(rule.classifier)
        prompts = (request.prompt.token_ids for request in call.requests[:: call.num_per_prompt])
        return classifier is not None and any(map(classifier.skips, prompts))

    async def _for_tier(self, number: int, call: CallPlan) -> CallPlan:
        """Return the plan with ids of this tier's own: others may run on the same nodes.

        What the tier before has said becomes its draft, unless the client has sent one.
        """
        if not number:
            return call
        draft = () if call.requests[0].prediction else await self._drafted(call)
        ran = any(self.lost)
        requests = [
            structs.replace(
                request,
                request_id=f"{request.request_id}-t{number}",
                prediction=request.prediction or (draft if index == 0 else ()),
                waited_s=0.0 if ran else request.waited_s,  # its promise begins with this tier
            )
            for index, request in enumerate(call.requests)
        ]
        return structs.replace(call, requests=requests)

    async def _drafted(self, call: CallPlan) -> Sequence[int]:
        """Return what the tier before has said as tokens of this one."""
        if not self.draft:
            return ()
        trace = self.ask.trace
        (ids,) = await call.model.tokenizer.encode_texts(
            [self.draft], Asker(trace.payer, math.inf), add_special_tokens=False
        )
        return ids[: call.model.max_model_len()]

    def _begin(self, rule: Escalation, call: CallPlan) -> Attempt:
        context, trace = self.ask.context, self.ask.trace
        requests, step = call.requests, call.num_per_prompt
        trace.num_prompt_tokens = sum(r.prompt.num_tokens for r in requests[::step])
        most = call.model.generator.max_inflight
        check_amounts(requests, step, most, echoes=call.echoes_prompt)
        callers.take_prompt(context, trace)
        hook = self.cascade.hooks[rule.hook] if rule.hook else None
        return Attempt(call, rule, hook, offers_tools=_offers_tools(self.ask.values))

    def _lost_before(self, call: CallPlan, num_tokens: int) -> None:
        """Note a tier that another coordinator has asked, and charged for."""
        self.lost.append(num_tokens)
        if num_tokens:  # else it was skipped
            prompts = call.requests[:: call.num_per_prompt]
            num_prompt_tokens = sum(request.prompt.num_tokens for request in prompts)
            model = call.model
            use = TierUsage.of(model.name, model.price, num_prompt_tokens, 0, num_tokens)
            self.ask.trace.tiers.append(use)

    def _lose(self, attempt: Attempt) -> None:
        """Charge the tier, and note it for the bill."""
        self.draft = attempt.text
        used, trace = attempt.use, self.ask.trace
        trace.tiers.append(used)
        callers.charge_tier(self.ask.context, trace, used)

    def _count(self, used: TierUsage) -> None:
        """Have what a failed attempt has used charged as the call's."""
        trace = self.ask.trace
        trace.num_dispatched_tokens = used.prompt_tokens
        trace.num_cached_tokens = used.cached_tokens
        trace.num_completion_tokens = used.completion_tokens

    def tell(self, tier: Tier, outcome: str) -> None:
        """Tell of the outcome of a tier."""
        self.ask.context.observer.tier_ended(self.cascade.name, tier.name, outcome)


def _offers_tools(values: dict[str, Any]) -> bool:
    choice = values.get("tool_choice")
    kind = choice.get("type") if isinstance(choice, dict) else choice
    return bool(values.get("tools")) and kind != "none"
