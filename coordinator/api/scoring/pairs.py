"""The prompts that score pairs of texts, and the scores that come of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from coordinator.api.embeddings.plan import pooled
from coordinator.api.embeddings.prompts import Prompts, check_lengths, whole_texts
from coordinator.api.prompt.fit import check_num_chars
from coordinator.api.prompt.parameter import PromptParameter
from coordinator.api.read.terms import ServiceTerms
from coordinator.api.scoring.objects import ScoringFields
from coordinator.models.embedding import EmbeddingModel
from coordinator.models.model import Model
from coordinator.models.scoring import AFTER, BEFORE, YesNo
from pdserve.protocol import SamplingParams, TokenEvent
from pdserve.shared.errors import InvalidRequest, PdserveError

MAX_PAIR_CHARS = 2**24  # of all pairs' texts together, though a query came only once


@dataclass(frozen=True, slots=True)
class TextPairs:
    """Pairs of texts: of each the first and the second one, as indices."""

    first: Sequence[str]
    second: Sequence[str]
    indices: list[tuple[int, int]]
    name: str  # of the parameter that has the second ones


@dataclass(frozen=True, slots=True)
class ScoredPairs:
    """What is to run, and how its events become a score of each pair."""

    prompts: Prompts
    scores: Callable[[Sequence[TokenEvent]], list[float]]


async def scored_pairs(
    pairs: TextPairs, body: ScoringFields, model: Model, terms: ServiceTerms
) -> ScoredPairs:
    """Plan the prompts of a call. Raises RequestError."""
    model.scoring.check()
    judge = model.scoring.judge
    if judge is not None:
        return await _judged(pairs, body, model, terms, judge)
    if body.instruction is not None:
        raise InvalidRequest(
            "'instruction' is for rerankers; this model compares embeddings: write what it should "
            "know into the query",
            "instruction",
        )
    texts = PromptParameter(pairs.name, len(pairs.first) + len(pairs.second))
    token_ids = await whole_texts(
        texts,
        [*pairs.first, *pairs.second],
        body,
        model,
        terms.asker,
        add_special_tokens=True,
    )
    prompts = Prompts(model, token_ids, pooled(model), terms, "score")
    return ScoredPairs(prompts, lambda events: _cosines(events, pairs, model.embedding))


def _cosines(
    events: Sequence[TokenEvent], pairs: TextPairs, embedding: EmbeddingModel
) -> list[float]:
    vectors = [embedding.direction(event.embedding) for event in events]
    num_first = len(pairs.first)
    return [float(vectors[i] @ vectors[num_first + j]) for i, j in pairs.indices]


async def _judged(
    pairs: TextPairs, body: ScoringFields, model: Model, terms: ServiceTerms, judge: YesNo
) -> ScoredPairs:
    _check_chars(pairs, body, model)
    texts = [
        judge.pair(body.instruction, pairs.first[i], pairs.second[j]) for i, j in pairs.indices
    ]
    token_ids = await _framed(texts, body, model, terms, pairs.name)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=1, logprobs=1, logprob_token_ids=[judge.yes, judge.no]
    )

    def scores(events: Sequence[TokenEvent]) -> list[float]:
        if not all(event.logprobs for event in events):
            raise PdserveError("a prompt ended without log-probabilities")
        return [judge.score(event.logprobs[0]) for event in events]

    return ScoredPairs(Prompts(model, token_ids, sampling, terms, "score"), scores)


def _check_chars(pairs: TextPairs, body: ScoringFields, model: Model) -> None:
    """Check what the texts of all pairs will have, before there are any.

    Raises InvalidRequest or ContextLengthExceeded.
    """
    each = len(body.instruction or "")
    sizes = [each + len(pairs.first[i]) + len(pairs.second[j]) for i, j in pairs.indices]
    check_num_chars(max(sizes), model.tokenizer, model.max_model_len(), pairs.name)
    if sum(sizes) > MAX_PAIR_CHARS:
        raise InvalidRequest(
            f"all pairs together have {sum(sizes)} characters, each with its query; a call can "
            f"have at most {MAX_PAIR_CHARS}: send fewer at a time",
            pairs.name,
        )


async def _framed(
    texts: Sequence[str], body: ScoringFields, model: Model, terms: ServiceTerms, name: str
) -> list[list[int]]:
    """Return the prompts of these texts, each cut at its end if that is asked for."""
    tokenizer, max_model_len = model.tokenizer, model.max_model_len()
    before = tokenizer.encode(BEFORE, add_special_tokens=False)
    after = tokenizer.encode(AFTER, add_special_tokens=False)
    num_left = _num_kept(body, max_model_len - 1) - len(before) - len(after)
    is_cut = body.truncate_prompt_tokens is not None
    if is_cut and num_left < 1:
        raise InvalidRequest(
            f"'truncate_prompt_tokens' leaves nothing of a document: the instructions around it "
            f"have {len(before) + len(after)} tokens",
            "truncate_prompt_tokens",
        )
    encoded = await tokenizer.encode_texts(
        texts, terms.asker, add_special_tokens=False, max_tokens=None if is_cut else max_model_len
    )
    prompts = [[*before, *(ids[:num_left] if is_cut else ids), *after] for ids in encoded]
    check_lengths(prompts, max_model_len - 1, name)
    return prompts


def _num_kept(body: ScoringFields, most: int) -> int:
    """Return how many tokens a prompt may have, of its end all. Raises InvalidRequest."""
    if body.truncation_side == "left":
        raise InvalidRequest(
            "'truncation_side' cannot be 'left': a document is cut at its end", "truncation_side"
        )
    wanted = body.truncate_prompt_tokens
    return most if wanted in (None, -1) else min(wanted or 0, most)
