"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from aiohttp import web
from msgspec import structs

from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.chat_format import ChatFormat
from coordinator.api.answer.formats import AnswerFormat, AnswerHead, PromptsShown, UsageShown
from coordinator.api.answer.logprobs import TokenNames
from coordinator.api.answer.run import answer
from coordinator.api.context import CONTEXT, ApiContext
from coordinator.api.endpoint import admit, answer_head, usage_shown
from coordinator.api.plan.generations import answers_like, generation
from coordinator.api.plan.limits import check_num_chars, default_max_tokens, output_limit, truncated
from coordinator.api.plan.parts import (
    PartsPlan,
    call_grammar,
    check_tools,
    must_call,
    plan_parts,
    with_allowed_tools,
)
from coordinator.api.plan.sampling import bad_words, sampling_params, text_options
from coordinator.api.prompt.messages import conversation, echoed_text
from coordinator.api.read.body import read_request
from coordinator.api.read.functions import with_functions_as_tools
from coordinator.api.read.requests import ChatRequest
from coordinator.api.read.structured import answer_grammar, wanted_output
from coordinator.api.read.terms import ServiceTerms, service_terms
from coordinator.text.grammars import Thinking
from coordinator.text.threads import Asker
from pdserve.errors import InvalidRequest
from pdserve.protocol import SamplingParams


async def chat_completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions: answer a conversation."""
    return await answer(request, request.app[CONTEXT], await _plan(request))


async def _plan(request: web.Request) -> CallPlan:
    """Read the request and plan the call, which keeps nothing of the body. Raises RequestError."""
    context = request.app[CONTEXT]
    trace = admit(request, context)
    body = with_functions_as_tools(await read_request(request, ChatRequest, context.config))
    context.check_model(body.model)
    terms = service_terms(body, request.headers, context, trace)
    usage, echoed = usage_shown(body), echoed_text(body)

    def make_format(head: AnswerHead, parts: PartsPlan, prompt: Sequence[int]) -> ChatFormat:
        prompts = PromptsShown(
            token_ids=[prompt],
            num_choices=body.n or 1,
            num_top=body.prompt_logprobs,
            tells_ids=bool(body.return_token_ids),
        )
        return ChatFormat(
            head,
            TokenNames(context.tokenizer, are_ids=bool(body.return_tokens_as_token_ids)),
            parts,
            prompts,
            shows_logprobs=bool(body.logprobs),
            usage_shown=usage,
            echoed=echoed,
        )

    plan = await plan_chat(body, context, terms, f"chatcmpl-{trace.unique}", make_format)
    return replace(plan, counts_along=usage is UsageShown.EVERYWHERE)


async def plan_chat(
    body: ChatRequest,
    context: ApiContext,
    terms: ServiceTerms,
    answer_id: str,
    make_format: Callable[[AnswerHead, PartsPlan, Sequence[int]], AnswerFormat],
) -> CallPlan:
    """Validate the request and plan the call, before anything runs. Raises RequestError."""
    body = with_allowed_tools(body)
    _check_logprobs(body)
    max_model_len = context.max_model_len()
    requested = body.max_completion_tokens or body.max_tokens
    fitting = max_model_len if body.truncate_prompt_tokens is None else None
    token_ids = await encode_chat(body, context, terms.asker, max_tokens=fitting)
    token_ids = truncated(token_ids, body, requested or 1, max_model_len)
    max_tokens = output_limit(len(token_ids), requested, None, max_model_len)
    parts = plan_parts(body, token_ids, context.tokenizer, context.parts)
    num_choices = body.n or 1
    sampling = await _sampling(body, context, terms, max_tokens, parts.thinking)
    if requested is None:
        most = default_max_tokens(sampling, len(token_ids), num_choices)
        sampling = structs.replace(sampling, max_tokens=most)
    head = answer_head(context, answer_id, body.model)
    first = generation(head.id, token_ids, sampling, terms, context.clock.now())
    return CallPlan(
        requests=answers_like(first, num_choices),
        num_per_prompt=num_choices,
        text=replace(text_options(body), kept_ids=parts.kept_ids),
        format=make_format(head, parts, token_ids),
        is_streaming=bool(body.stream),
    )


async def encode_chat(
    body: ChatRequest, context: ApiContext, asker: Asker, *, max_tokens: int | None
) -> list[int]:
    """Return the token ids of the rendered conversation, including tools.

    More than `max_tokens` may be refused. Raises RequestError.
    """
    body = with_allowed_tools(body)
    check_tools(body, context.tokenizer, context.parts)
    chat = conversation(body)
    check_num_chars(chat.num_chars, context.tokenizer, context.max_model_len(), "messages")
    token_ids = await context.tokenizer.encode_chat(chat, asker, max_tokens=max_tokens)
    if not token_ids:
        raise InvalidRequest(
            "the chat template turns 'messages' into an empty prompt; at least one token is needed",
            "messages",
        )
    return token_ids


def _check_logprobs(body: ChatRequest) -> None:
    """Check options about log-probabilities that depend on others. Raises InvalidRequest."""
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "'prompt_logprobs' cannot be combined with 'stream'", "prompt_logprobs"
        )
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", "top_logprobs")


async def _sampling(
    body: ChatRequest,
    context: ApiContext,
    terms: ServiceTerms,
    max_tokens: int,
    thinking: Thinking | None,
) -> SamplingParams:
    """Return the sampling parameters of the first answer. Raises InvalidRequest."""
    output = wanted_output(body)
    if must_call(body):
        output = None
    calls = call_grammar(body, context.tokenizer, context.parts, has_output=output is not None)
    grammar = await answer_grammar(context, terms.slo.tenant, output, calls, thinking)
    sampling = sampling_params(
        body,
        context.tokenizer,
        bad_words=await bad_words(body, context.tokenizer, terms.asker),
        max_tokens=max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        grammar=grammar,
    )
    return structs.replace(sampling, prompt_logprobs=body.prompt_logprobs)
