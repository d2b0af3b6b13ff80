"""POST /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence

import msgspec
from aiohttp import web

from coordinator.api.answer.call import answer_headers
from coordinator.api.context import CONTEXT, RequestTrace, outbox_of
from coordinator.api.embeddings.objects import (
    MAX_INPUTS,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
)
from coordinator.api.embeddings.run import PromptRun
from coordinator.api.plan.generations import generations
from coordinator.api.prompt.fit import truncated
from coordinator.api.prompt.parameter import PromptParameter
from coordinator.api.read.body import read_request
from coordinator.api.read.terms import service_terms
from coordinator.api.server import callers
from coordinator.generation import Generation
from coordinator.models.model import Model
from coordinator.text.threads import Asker
from pdserve.errors import ContextLengthExceeded, InvalidRequest
from pdserve.protocol import SamplingParams, TokenEvent

_CHARS_PER_BYTE = 6  # of a vector: a number of four bytes has about 22 characters
_INPUT = PromptParameter("input", MAX_INPUTS)


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings: return a vector for each input."""
    context = request.app[CONTEXT]
    trace = callers.admit(request, context)
    body = await read_request(request, EmbeddingRequest, context.config)
    model = context.models.find(body.model)
    model.embedding.check(body.dimensions)
    terms = service_terms(body, request.headers, context, trace)
    prompts = await _prompts(body, model, terms.asker)
    trace.num_choices = len(prompts)
    trace.num_prompt_tokens = sum(map(len, prompts))
    callers.take_prompt(context, trace)

    def start(index: int) -> Generation:
        now_s = context.clock.now()  # this prompt may have waited for others of the call
        sampling = SamplingParams(max_tokens=0, pooling=model.embedding.pooling)
        answer_id, ids = f"embd-{trace.unique}-{index}", prompts[index]
        (embedder,) = generations(answer_id, ids, sampling, terms, now_s)
        return model.generator.start(embedder)

    async with PromptRun(start, len(prompts), context, trace) as run:
        try:
            events = await run.events()
        finally:
            _account(trace, prompts, run)
    trace.finish_reason = "stop"
    await outbox_of(request).reserve(_CHARS_PER_BYTE * sum(len(e.embedding) for e in events))
    return web.Response(
        body=await asyncio.to_thread(_answer, body, model, trace, events),
        content_type="application/json",
        headers=answer_headers(run.routes),
    )


async def _prompts(body: EmbeddingRequest, model: Model, asker: Asker) -> list[list[int]]:
    """Return the inputs as token ids. Raises InvalidRequest or ContextLengthExceeded."""
    max_model_len = model.max_model_len()
    inputs = _INPUT.split(body.input, max_model_len)
    if "" in inputs:
        raise InvalidRequest("'input' must not contain an empty string", "input")
    prompts = await _INPUT.encode(
        inputs,
        model.tokenizer,
        asker,
        add_special_tokens=body.add_special_tokens is not False,
        max_model_len=max_model_len,
        is_truncated=body.truncate_prompt_tokens is not None,
    )
    prompts = [truncated(ids, body, 0, max_model_len) for ids in prompts]
    for index, token_ids in enumerate(prompts):
        if len(token_ids) > max_model_len:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {max_model_len} tokens, but input {index} "
                f"(counted from 0) has {len(token_ids)}",
                "input",
            )
    return prompts


def _account(trace: RequestTrace, prompts: Sequence[Sequence[int]], run: PromptRun) -> None:
    """Count the prompts that were sent to nodes, also those of a failed call."""
    sent = [
        len(ids) for ids, route in zip(prompts, run.routes, strict=False) if route.was_dispatched
    ]
    trace.num_prompt_tokens = trace.num_dispatched_tokens = sum(sent)
    trace.num_cached_tokens = sum(event.cached_tokens for event in run.found.values())


def _answer(
    body: EmbeddingRequest, model: Model, trace: RequestTrace, events: Sequence[TokenEvent]
) -> bytes:
    """Return the answer as JSON.

    Embeddings are encoded one at a time: encoding millions of numbers in one call would hold the
    interpreter for seconds.
    """
    data = []
    for index, event in enumerate(events):
        vector = model.embedding.finished(event.embedding, body.dimensions)
        is_base64 = body.encoding_format == "base64"
        shown = base64.b64encode(vector.tobytes()).decode("ascii") if is_base64 else vector.tolist()
        data.append(msgspec.Raw(msgspec.json.encode(Embedding(index=index, embedding=shown))))
    num_tokens = trace.num_prompt_tokens
    answer = EmbeddingList(data=[], model=body.model, usage=EmbeddingUsage(num_tokens, num_tokens))
    return msgspec.json.encode(msgspec.structs.asdict(answer) | {"data": data})
