"""The prompts of a call that wants one event of each: all are prefilled, none decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.api.answer.call import answer_headers
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.embeddings.run import PromptRun
from coordinator.api.plan.generations import generations
from coordinator.api.prompt.fit import truncated
from coordinator.api.prompt.parameter import Given, PromptParameter
from coordinator.api.read.fields import CallFields
from coordinator.api.read.terms import ServiceTerms
from coordinator.api.server import callers
from coordinator.generation import Generation
from coordinator.models.model import Model
from coordinator.text.threads import Asker
from pdserve.protocol import SamplingParams, TokenEvent
from pdserve.shared.errors import ContextLengthExceeded, InvalidRequest

_ID_BYTES = 8  # of a list; the numbers themselves are the vocabulary's


@dataclass(frozen=True, slots=True)
class Prompts:
    """All prompts of one call, and what is wanted of each."""

    model: Model
    token_ids: list[list[int]]
    sampling: SamplingParams  # of at most one token
    terms: ServiceTerms
    kind: str  # of the answer, as ids begin: "embd"

    async def run(
        self, context: ApiContext, trace: RequestTrace
    ) -> tuple[list[TokenEvent], dict[str, str]]:
        """Run all, and return the event of each and the answer's headers.

        Raises what the generations raise.
        """
        trace.num_choices = len(self.token_ids)
        trace.num_prompt_tokens = sum(map(len, self.token_ids))
        # Ids of all that wait for their turn: of many calls at a time, they would fill the memory.
        await trace.keep_of_body(_ID_BYTES * trace.num_prompt_tokens)
        callers.take_prompt(context, trace)

        def start(index: int) -> Generation:
            return self._start(index, trace.unique, context.clock.now())

        async with PromptRun(start, len(self.token_ids), context, trace) as run:
            try:
                events = await run.events()
            finally:
                _account(trace, self.token_ids, run)
        trace.finish_reason = "stop"
        return events, answer_headers(run.routes)

    def _start(self, index: int, unique: str, now_s: float) -> Generation:
        """Start a prompt, which may have waited for others of the call."""
        answer_id, ids = f"{self.kind}-{unique}-{index}", self.token_ids[index]
        (request,) = generations(answer_id, ids, self.sampling, self.terms, now_s)
        return self.model.generator.start(request)


async def whole_texts(
    parameter: PromptParameter,
    given: Sequence[Given],
    fields: CallFields,
    model: Model,
    asker: Asker,
    *,
    add_special_tokens: bool,
) -> list[list[int]]:
    """Return texts to embed as token ids. Raises InvalidRequest or ContextLengthExceeded."""
    name, max_model_len = parameter.name, model.max_model_len()
    if "" in given:
        raise InvalidRequest(f"{name!r} must not contain an empty string", name)
    prompts = await parameter.encode(
        given,
        model.tokenizer,
        asker,
        add_special_tokens=add_special_tokens,
        max_model_len=max_model_len,
        is_truncated=fields.truncate_prompt_tokens is not None,
    )
    prompts = [truncated(ids, fields, 0, max_model_len) for ids in prompts]
    check_lengths(prompts, max_model_len, name)
    return prompts


def check_lengths(prompts: Sequence[Sequence[int]], most: int, name: str) -> None:
    """Check that prompts have at most so many tokens. Raises ContextLengthExceeded."""
    for index, token_ids in enumerate(prompts):
        if len(token_ids) > most:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {most} tokens, but {name} {index} "
                f"(counted from 0) has {len(token_ids)}",
                name,
            )


def _account(trace: RequestTrace, prompts: Sequence[Sequence[int]], run: PromptRun) -> None:
    """Count the prompts that were sent to nodes, also those of a failed call."""
    sent = [
        len(ids) for ids, route in zip(prompts, run.routes, strict=False) if route.was_dispatched
    ]
    trace.num_prompt_tokens = trace.num_dispatched_tokens = sum(sent)
    trace.num_cached_tokens = sum(event.cached_tokens for event in run.found.values())
