"""POST /v1/completions."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.answer import answer
from coordinator.api.body import read_request
from coordinator.api.call import CallPlan
from coordinator.api.context import CONTEXT, ApiContext, RequestTrace
from coordinator.api.endpoint import admit, answer_head, shows_usage
from coordinator.api.formats import CompletionFormat
from coordinator.api.limits import output_limit
from coordinator.api.prompts import encode_prompt, split_prompts
from coordinator.api.requests import CompletionRequest
from coordinator.api.sampling import sampling_params, text_options
from coordinator.api.terms import ServiceTerms, service_terms
from coordinator.generation import GenerationRequest

DEFAULT_MAX_TOKENS = 16


async def completions(request: web.Request) -> web.StreamResponse:
    """Continue one prompt or several; each gets a choice of its own."""
    context = request.app[CONTEXT]
    trace = admit(request, context)
    body = await read_request(request, CompletionRequest, context.config)
    context.check_model(body.model)
    terms = service_terms(body, request.headers, context, trace)
    return await answer(request, context, await _plan(body, context, trace, terms))


async def _plan(
    body: CompletionRequest, context: ApiContext, trace: RequestTrace, terms: ServiceTerms
) -> CallPlan:
    """Everything about the call that can be said before it runs. Raises RequestError."""
    usage = shows_usage(body)
    text = text_options(body)
    max_model_len = context.max_model_len()
    prompts = [
        await encode_prompt(
            prompt,
            context.tokenizer,
            add_special_tokens=body.add_special_tokens is not False,
            max_model_len=max_model_len,
        )
        for prompt in split_prompts(body.prompt, max_model_len)
    ]
    head = answer_head(context, f"cmpl-{trace.unique}", body.model)
    requests = [
        _generation(body, context, terms, f"{head.id}-{i}", token_ids, max_model_len)
        for i, token_ids in enumerate(prompts)
    ]
    return CallPlan(
        requests=requests,
        text=text,
        format=CompletionFormat(
            head,
            context.tokenizer,
            shows_logprobs=body.logprobs is not None,
            shows_usage=usage,
        ),
        is_streaming=bool(body.stream),
        shows_usage=usage,
    )


def _generation(
    body: CompletionRequest,
    context: ApiContext,
    terms: ServiceTerms,
    request_id: str,
    token_ids: list[int],
    max_model_len: int,
) -> GenerationRequest:
    max_tokens = output_limit(len(token_ids), body.max_tokens, DEFAULT_MAX_TOKENS, max_model_len)
    now_s = context.clock.now()
    return GenerationRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling=sampling_params(
            body, context.tokenizer, max_tokens=max_tokens, logprobs=body.logprobs
        ),
        cache_salt=terms.cache_salt,
        slo=terms.slo,
        waited_s=terms.waited_s(now_s),
        deadline_s=terms.deadline_s(now_s),
    )
