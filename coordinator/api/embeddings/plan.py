"""POST /v1/embeddings: a vector for each input."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from coordinator.api.answer.run import WholeAnswer
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.embeddings.objects import (
    MAX_INPUTS,
    Embedding,
    EmbeddingList,
    EmbeddingRequest,
    PromptUsage,
)
from coordinator.api.embeddings.prompts import Prompts, whole_texts
from coordinator.api.prompt.parameter import PromptParameter
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.terms import service_terms
from coordinator.models.model import Model
from pdserve.protocol import SamplingParams, TokenEvent

_CHARS_PER_BYTE = 6  # of a vector: a number of four bytes has about 22 characters
_INPUT = PromptParameter("input", MAX_INPUTS)


@dataclass(frozen=True, slots=True)
class EmbeddingPlan:
    """A planned call, whose answer is a vector for each input."""

    name: str  # of the model, as the caller has it
    dimensions: int | None  # None: all
    is_base64: bool
    prompts: Prompts  # the inputs

    async def run(self, context: ApiContext, trace: RequestTrace) -> WholeAnswer:
        """Run all prompts, and return their vectors. Raises what the generations raise."""
        events, headers = await self.prompts.run(context, trace)
        if trace.outbox is not None:
            num_bytes = sum(len(event.embedding) for event in events)
            await trace.outbox.reserve(_CHARS_PER_BYTE * num_bytes)
        body = await asyncio.to_thread(self._answer, events, trace.num_prompt_tokens)
        return WholeAnswer(body, headers)

    def _answer(self, events: Sequence[TokenEvent], num_tokens: int) -> bytes:
        """Return the answer as JSON.

        Embeddings are encoded one at a time: encoding millions of numbers in one call would hold
        the interpreter for seconds.
        """
        data = []
        for index, event in enumerate(events):
            vector = self.prompts.model.embedding.finished(event.embedding, self.dimensions)
            shown = _base64(vector.tobytes()) if self.is_base64 else vector.tolist()
            data.append(msgspec.Raw(msgspec.json.encode(Embedding(index=index, embedding=shown))))
        usage = PromptUsage(num_tokens, num_tokens)
        answer = EmbeddingList(data=[], model=self.name, usage=usage)
        return msgspec.json.encode(msgspec.structs.asdict(answer) | {"data": data})


async def plan_embeddings(ask: Ask) -> EmbeddingPlan:
    """Plan a vector for each input. Raises RequestError."""
    body = convert_request(ask.values, EmbeddingRequest)
    model = await ask.model(body.model)
    model.embedding.check(body.dimensions)
    terms = service_terms(body, ask.headers, ask.context, ask.trace)
    given = _INPUT.split(body.input, model.max_model_len())
    adds = body.add_special_tokens is not False
    token_ids = await whole_texts(_INPUT, given, body, model, terms.asker, add_special_tokens=adds)
    prompts = Prompts(model, token_ids, pooled(model), terms, "embd")
    return EmbeddingPlan(body.model, body.dimensions, body.encoding_format == "base64", prompts)


def pooled(model: Model) -> SamplingParams:
    """Return what is wanted of a prompt that is to be embedded."""
    return SamplingParams(max_tokens=0, pooling=model.embedding.pooling)


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")
