"""POST /v1/chat/completions, in four stages.

A chat is read (`read/chat.py`); its prompt is rendered and tokenised (`prompt/chat.py`); the parts
of its answers are planned (`plan/parts.py`), and how their tokens are sampled (`plan/sampling.py`).
What comes of it is a `CallPlan`, which any caller runs (`calls.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import msgspec
from msgspec import UNSET, structs

from coordinator.api.answer.call import CallPlan
from coordinator.api.answer.chat_format import ChatFormat
from coordinator.api.answer.formats import (
    AnswerFormat,
    AnswerHead,
    PromptsShown,
    UsageShown,
    usage_shown,
)
from coordinator.api.answer.logprobs import TokenNames
from coordinator.api.answer.sse import KEEP_ALIVE
from coordinator.api.context import ApiContext
from coordinator.api.plan.generations import PartsPlan, for_prompt, generations, plan_parts
from coordinator.api.plan.sampling import TextOptions, sampling_params, text_options
from coordinator.api.prompt.chat import chat_prompt, conversation_of, echoed_text, predicted
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.chat import ChatRequest, checked
from coordinator.api.read.terms import ServiceTerms, service_terms
from coordinator.generation import GenerationRequest
from coordinator.models.model import Model


class ChatPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A planned chat, whatever its answers will look like."""

    model: Model
    prompt: Sequence[int]
    parts: PartsPlan
    requests: list[GenerationRequest]  # one per choice
    text: TextOptions
    is_streaming: bool

    def call(
        self,
        answer_format: AnswerFormat,
        *,
        head: AnswerHead | None = None,
        counts_along: bool = False,
        keep_alive: bytes = KEEP_ALIVE,
        saved: Callable[[], Awaitable[None]] | None = None,
    ) -> CallPlan:
        """Return the call whose answers are encoded by `answer_format`."""
        return CallPlan(
            model=self.model,
            requests=self.requests,
            num_per_prompt=len(self.requests),
            text=self.text,
            format=answer_format,
            head=head,
            is_streaming=self.is_streaming,
            counts_along=counts_along,
            keep_alive=keep_alive,
            saved=saved,
            make_parts=self.parts.make,
        )

    @property
    def most_tokens(self) -> int:
        """The most tokens of an answer."""
        return self.requests[0].sampling.max_tokens

    def at_most(self, num_tokens: int) -> ChatPlan:
        """Return the plan of answers with no more tokens than these."""
        if num_tokens >= self.most_tokens:
            return self
        limited = [
            structs.replace(one, sampling=structs.replace(one.sampling, max_tokens=num_tokens))
            for one in self.requests
        ]
        return structs.replace(self, requests=limited)


async def plan_chat_call(ask: Ask) -> CallPlan:
    """Plan the answer to a conversation, which keeps nothing of the body. Raises RequestError."""
    context, trace = ask.context, ask.trace
    body = checked(convert_request(ask.values, ChatRequest))
    model = await ask.model(body.model)
    terms = service_terms(body, ask.headers, context, trace)
    usage, echoed = usage_shown(body), echoed_text(body)
    answer_id = f"chatcmpl-{trace.unique}"
    plan = await plan_chat(body, model, context, terms, answer_id)
    prompts = PromptsShown(
        token_ids=[plan.prompt],
        num_choices=body.n or 1,
        num_top=body.prompt_logprobs,
        tells_ids=bool(body.return_token_ids),
    )
    service_tier = UNSET if body.service_tier is None else terms.tier
    head = AnswerHead.now(answer_id, body.model, model, service_tier)
    chat_format = ChatFormat(
        head,
        TokenNames(model.tokenizer, are_ids=bool(body.return_tokens_as_token_ids)),
        plan.parts,
        prompts,
        shows_logprobs=bool(body.logprobs),
        usage_shown=usage,
        echoed=echoed,
    )
    return plan.call(chat_format, head=head, counts_along=usage is UsageShown.EVERYWHERE)


async def plan_chat(
    body: ChatRequest, model: Model, context: ApiContext, terms: ServiceTerms, answer_id: str
) -> ChatPlan:
    """Plan a chat that has been read, before anything runs. Raises RequestError."""
    asker, num_choices = terms.asker, body.n or 1
    prompt = await chat_prompt(body, model, asker)
    parts = await plan_parts(body, prompt.token_ids, model, context.config, terms)
    shared = await sampling_params(
        body,
        model,
        asker,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
        grammar=parts.grammar,
    )
    sampling = for_prompt(
        shared,
        prompt,
        seed=terms.draw("seed") if body.seed is None else body.seed,
        requested=body.requested_tokens,
        num_answers=num_choices,
    )
    prediction = await predicted(body, model, asker)
    now_s = context.clock.now()
    conversation = conversation_of(body.messages)
    requests = generations(
        answer_id, prompt.token_ids, sampling, terms, now_s, num_choices, conversation
    )
    if prediction:
        requests = [structs.replace(request, prediction=prediction) for request in requests]
    return ChatPlan(
        model=model,
        prompt=prompt.token_ids,
        parts=parts,
        requests=requests,
        text=structs.replace(
            text_options(body), kept_ids=parts.kept_ids, content_start=parts.content_start
        ),
        is_streaming=bool(body.stream),
    )
