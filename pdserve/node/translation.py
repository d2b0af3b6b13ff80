"""Between messages and engine: a leg as a request, and what was sampled for it as an event."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.engine.prompt_results.work import PromptWork
from pdserve.engine.request import Request, SampledToken
from pdserve.lifecycle import Lifecycle, Targets
from pdserve.protocol import (
    DecodeLeg,
    PhaseTimes,
    PrefillLeg,
    PrefixSource,
    PromptLogprobs,
    TokenEvent,
)


def request_of(
    leg: PrefillLeg | DecodeLeg, now_s: float, prefix_sources: Sequence[PrefixSource] = ()
) -> Request:
    """Return the engine's request for a leg that has just arrived.

    `prefix_sources` are the nodes from which its KV could be fetched again after a preemption.
    """
    emitted = leg.output_token_ids if isinstance(leg, DecodeLeg) else []
    return Request(
        request_id=leg.request_id,
        prompt=leg.prompt,
        sampling=leg.sampling,
        lifecycle=Lifecycle(received_s=now_s),
        leg_token_limit=1 if isinstance(leg, PrefillLeg) else None,
        targets=Targets.of(leg.slo, now_s),
        prefix_sources=list(prefix_sources),
        output_token_ids=list(emitted),
        num_emitted_before=len(emitted),
        flows=isinstance(leg, DecodeLeg) and leg.flows,
    )


def token_event(
    request: Request, token: SampledToken | None, times: PhaseTimes | None
) -> TokenEvent:
    """Return the event of the request's newest token; of its end if it ends with its prompt.

    `token` is the newest token, None if nothing was sampled. `times` belong to a node's last event
    of a request.
    """
    token_ids = [] if token is None else [token.token_id]
    index = len(request.output_token_ids) - len(token_ids)
    return TokenEvent(
        request_id=request.request_id,
        index=index,
        token_ids=token_ids,
        logprobs=[token.logprobs] if token and token.logprobs else [],
        finish_reason=request.finish_reason,
        stop_token_id=request.stop_token_id,
        cached_tokens=request.num_cached_tokens,
        prompt_logprobs=None if index else _prompt_logprobs(request.prompt_work),
        embedding=request.prompt_work.embedding if request.prompt_work else b"",
        times=times,
    )


def _prompt_logprobs(work: PromptWork | None) -> PromptLogprobs | None:
    if work is None or work.sampling.prompt_logprobs is None:
        return None
    return PromptLogprobs.of(work.logprobs)
