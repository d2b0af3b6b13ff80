"""The generation requests of a call: one for each answer to each of its prompts."""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from coordinator.api.plan.sampling import choice_seed
from coordinator.api.read.terms import ServiceTerms
from coordinator.generation import GenerationRequest
from pdserve.protocol import SamplingParams


def generation(
    request_id: str,
    token_ids: list[int],
    sampling: SamplingParams,
    terms: ServiceTerms,
    now_s: float,
) -> GenerationRequest:
    """Return the request for one answer. Raises DeadlineExceeded."""
    return GenerationRequest(
        request_id=request_id,
        token_ids=token_ids,
        sampling=sampling,
        cache_salt=terms.cache_salt,
        slo=terms.slo,
        waited_s=terms.waited_s(now_s),
        deadline_s=terms.deadline_s(now_s),
    )


def answers_like(first: GenerationRequest, num_answers: int) -> list[GenerationRequest]:
    """Return the requests for several answers to one prompt: `first`, and others like it."""
    return [first, *(_another(first, choice) for choice in range(1, num_answers))]


def _another(first: GenerationRequest, choice: int) -> GenerationRequest:
    sampling = structs.replace(
        first.sampling,
        seed=choice_seed(first.sampling.seed, choice),
        prompt_logprobs=None,  # scored once, for the first
    )
    return replace(first, request_id=f"{first.request_id}-{choice}", sampling=sampling)
