"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from msgspec import Meta, structs

from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.formats import (
    AnswerHead,
    CompletionFormat,
    PromptsShown,
    UsageShown,
    usage_shown,
)
from coordinator.api.answer.logprobs import TokenNames
from coordinator.api.plan.generations import for_prompt, generations
from coordinator.api.plan.grammar import text_grammar
from coordinator.api.plan.sampling import TextOptions, sampling_params, text_options
from coordinator.api.prompt.fit import FittedPrompt, fitted
from coordinator.api.prompt.parameter import Given, PromptParameter
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.fields import MAX_CHOICES, GenerationFields, NumLogprobs
from coordinator.api.read.terms import service_terms
from coordinator.generation import GenerationRequest
from coordinator.models.model import Model
from coordinator.text.threads import Asker
from pdserve.protocol import SamplingParams
from pdserve.shared.errors import InvalidRequest

DEFAULT_MAX_TOKENS = 16
MAX_GENERATED = 256  # answers generated for one request
_PARAMETER = PromptParameter("prompt", max_prompts=64)


_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_LISTS_OF_IDS = {"type": "array", "items": _IDS, "minItems": 1}
_PROMPT = {"anyOf": [{"type": "string"}, _TEXTS, _IDS, _LISTS_OF_IDS]}


class CompletionRequest(GenerationFields, kw_only=True):
    """The body of POST /v1/completions. For the prompt's four forms see `Given`."""

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT)]
    best_of: Annotated[int, Meta(ge=0, le=MAX_CHOICES)] | None = None
    logprobs: NumLogprobs | None = None
    echo: bool | None = None
    max_tokens: Annotated[int, Meta(ge=0, lt=2**31)] | None = None  # 0: no output


async def plan_completion(ask: Ask) -> CallPlan:
    """Plan how one or more prompts go on, each in at least one choice. Raises RequestError."""
    context, trace = ask.context, ask.trace
    body = convert_request(ask.values, CompletionRequest)
    model = await ask.model(body.model)
    terms, usage = service_terms(body, ask.headers, context, trace), usage_shown(body)
    _check_prompt_options(body)
    max_model_len = model.max_model_len()
    given = _PARAMETER.split(body.prompt, max_model_len)
    num_shown, num_per_prompt = body.n or 1, _num_generated(body, len(given))
    prompts = await _prompts(given, body, model, terms.asker, max_model_len)
    shared = await sampling_params(
        body,
        model,
        terms.asker,
        logprobs=_num_logprobs(body),
        prompt_logprobs=_num_prompt_logprobs(body),
        grammar=await text_grammar(body, model, terms.slo.tenant),
    )
    head = AnswerHead.now(f"cmpl-{trace.unique}", body.model, model)
    now_s = context.clock.now()
    requests: list[GenerationRequest] = []
    for i, prompt in enumerate(prompts):
        seed = terms.draw("seed", i) if body.seed is None else body.seed
        first = _sampling(body, shared, prompt, seed)
        answer_id, ids = f"{head.id}-{i}", prompt.token_ids
        requests += generations(answer_id, ids, first, terms, now_s, num_per_prompt)
    return CallPlan(
        model=model,
        requests=requests,
        num_per_prompt=num_per_prompt,
        num_shown=num_shown if num_per_prompt > num_shown else None,
        text=_text_options(body, given),
        format=_format(body, model, head, prompts, usage),
        head=head,
        is_streaming=bool(body.stream),
        counts_along=usage is UsageShown.EVERYWHERE,
        echoes_prompt=bool(body.echo),
    )


def _format(
    body: CompletionRequest,
    model: Model,
    head: AnswerHead,
    prompts: Sequence[FittedPrompt],
    usage: UsageShown,
) -> CompletionFormat:
    shown = PromptsShown(
        token_ids=[prompt.token_ids for prompt in prompts],
        num_choices=body.n or 1,
        num_top=body.prompt_logprobs,
        tells_ids=bool(body.return_token_ids),
    )
    names = TokenNames(model.tokenizer, are_ids=bool(body.return_tokens_as_token_ids))
    listed = _num_listed(body)
    return CompletionFormat(head, names, shown, num_logprobs=listed, usage_shown=usage)


def _check_prompt_options(body: CompletionRequest) -> None:
    """Check options about the prompt that depend on each other. Raises InvalidRequest."""
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InvalidRequest(
            "'max_tokens' can be 0 only with 'echo' or 'prompt_logprobs'", "max_tokens"
        )
    if body.logprob_token_ids and body.logprobs is None:
        raise InvalidRequest("'logprob_token_ids' needs 'logprobs'", "logprob_token_ids")
    if body.logprob_token_ids and body.echo:
        raise InvalidRequest(
            "'logprob_token_ids' are listed for tokens of the answer, not for an echoed prompt: "
            "leave out 'echo'",
            "logprob_token_ids",
        )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "'prompt_logprobs' cannot be combined with 'stream'; 'echo' with 'logprobs' can",
            "prompt_logprobs",
        )


def _num_listed(body: CompletionRequest) -> int | None:
    """Return how many log-probabilities are shown per token of the answer; None: none."""
    listed = body.logprob_token_ids
    return 1 + len(listed) if listed else body.logprobs


def _num_generated(body: CompletionRequest, num_prompts: int) -> int:
    """Return the answers to generate per prompt, including those not shown.

    Raises InvalidRequest.
    """
    num_shown = body.n or 1
    num_generated = body.best_of or num_shown
    if num_generated < num_shown:
        raise InvalidRequest(
            f"'best_of' ({num_generated}) must be at least 'n' ({num_shown})", "best_of"
        )
    if num_generated > num_shown and body.stream:
        raise InvalidRequest(
            "'best_of' above 'n' cannot be combined with 'stream': the best answers are known only "
            "when all are complete",
            "best_of",
        )
    if num_prompts * num_generated > MAX_GENERATED:
        raise InvalidRequest(
            f"{num_prompts} prompts with {num_generated} answers each make "
            f"{num_prompts * num_generated} answers; a request can have at most {MAX_GENERATED}",
            "n",
        )
    return num_generated


# ---- prompts -----------------------------------------------------------------------------------


def _adds_special_tokens(body: CompletionRequest) -> bool:
    return body.add_special_tokens is not False


async def _prompts(
    given: Sequence[Given],
    body: CompletionRequest,
    model: Model,
    asker: Asker,
    max_model_len: int,
) -> list[FittedPrompt]:
    """Return the prompts, truncated if so requested. Raises RequestError."""
    prompts = await _PARAMETER.encode(
        given,
        model.tokenizer,
        asker,
        add_special_tokens=_adds_special_tokens(body),
        max_model_len=max_model_len,
        is_truncated=body.truncate_prompt_tokens is not None,
    )
    return [fitted(token_ids, body, body.max_tokens, max_model_len) for token_ids in prompts]


def _text_options(body: CompletionRequest, given: Sequence[Given]) -> TextOptions:
    """Return how tokens become text; an echo hides special tokens that encoding has added."""
    are_added = _adds_special_tokens(body) and any(isinstance(prompt, str) for prompt in given)
    return structs.replace(text_options(body), echoes_special_tokens=not are_added)


# ---- sampling ----------------------------------------------------------------------------------


def _sampling(
    body: CompletionRequest, shared: SamplingParams, prompt: FittedPrompt, seed: int
) -> SamplingParams:
    """Return the sampling parameters of a prompt's first answer. Raises InvalidRequest."""
    return for_prompt(
        shared, prompt, seed=seed, requested=body.max_tokens, default=DEFAULT_MAX_TOKENS
    )


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """Return how many top log-probabilities per prompt token to request from nodes.

    None: the prompt is not scored.
    """
    asked = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((num for num in asked if num is not None), default=None)


def _num_logprobs(body: CompletionRequest) -> int | None:
    """Return how many top log-probabilities to request from nodes; `best_of` needs at least 0."""
    return 0 if body.logprobs is None and (body.best_of or 1) > (body.n or 1) else body.logprobs
