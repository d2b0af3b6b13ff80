"""POST /v1/embeddings: a vector for each input."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from coordinator.api.answer.call import answer_headers
from coordinator.api.answer.run import WholeAnswer
from coordinator.api.context import ApiContext, RequestTrace
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
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.terms import ServiceTerms, service_terms
from coordinator.api.server import callers
from coordinator.generation import Generation
from coordinator.models.model import Model
from coordinator.text.threads import Asker
from pdserve.protocol import SamplingParams, TokenEvent
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest

_CHARS_PER_BYTE = 6  # of a vector: a number of four bytes has about 22 characters
_INPUT = PromptParameter("input", MAX_INPUTS)


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """A planned call, whose answer is a vector for each input."""

    name: str  # of the model, as the caller has it
    model: Model
    dimensions: int | None  # None: all
    is_base64: bool
    prompts: list[list[int]]  # token ids of the inputs
    terms: ServiceTerms

    async def run(self, context: ApiContext, trace: RequestTrace) -> WholeAnswer:
        """Run all prompts, and return their vectors. Raises what the generations raise."""
        trace.release_body()  # all that is needed of it is in the plan
        trace.num_choices = len(self.prompts)
        trace.num_prompt_tokens = sum(map(len, self.prompts))
        callers.take_prompt(context, trace)

        def start(index: int) -> Generation:
            return self._start(index, trace.unique, context.clock.now())

        async with PromptRun(start, len(self.prompts), context, trace) as run:
            try:
                events = await run.events()
            finally:
                _account(trace, self.prompts, run)
        trace.finish_reason = "stop"
        if trace.outbox is not None:
            num_bytes = sum(len(event.embedding) for event in events)
            await trace.outbox.reserve(_CHARS_PER_BYTE * num_bytes)
        body = await asyncio.to_thread(self._answer, events, trace.num_prompt_tokens)
        return WholeAnswer(body, answer_headers(run.routes))

    def _start(self, index: int, unique: str, now_s: float) -> Generation:
        """Start a prompt, which may have waited for others of the call."""
        sampling = SamplingParams(max_tokens=0, pooling=self.model.embedding.pooling)
        answer_id, ids = f"embd-{unique}-{index}", self.prompts[index]
        (embedder,) = generations(answer_id, ids, sampling, self.terms, now_s)
        return self.model.generator.start(embedder)

    def _answer(self, events: Sequence[TokenEvent], num_tokens: int) -> bytes:
        """Return the answer as JSON.

        Embeddings are encoded one at a time: encoding millions of numbers in one call would hold
        the interpreter for seconds.
        """
        data = []
        for index, event in enumerate(events):
            vector = self.model.embedding.finished(event.embedding, self.dimensions)
            shown = _base64(vector.tobytes()) if self.is_base64 else vector.tolist()
            data.append(msgspec.Raw(msgspec.json.encode(Embedding(index=index, embedding=shown))))
        usage = EmbeddingUsage(num_tokens, num_tokens)
        answer = EmbeddingList(data=[], model=self.name, usage=usage)
        return msgspec.json.encode(msgspec.structs.asdict(answer) | {"data": data})


async def plan_embeddings(ask: Ask) -> EmbeddingPlan:
    """Plan a vector for each input. Raises RequestError."""
    body = convert_request(ask.values, EmbeddingRequest)
    model = ask.context.models.find(body.model)
    model.embedding.check(body.dimensions)
    terms = service_terms(body, ask.headers, ask.context, ask.trace)
    prompts = await _prompts(body, model, terms.asker)
    is_base64 = body.encoding_format == "base64"
    return EmbeddingPlan(body.model, model, body.dimensions, is_base64, prompts, terms)


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


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
