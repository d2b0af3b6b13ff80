"""POST /v1/rerank and /v1/score."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from coordinator.api.answer.run import WholeAnswer
from coordinator.api.context import ApiContext, RequestTrace
from coordinator.api.embeddings.objects import MAX_INPUTS, PromptUsage
from coordinator.api.read.ask import Ask
from coordinator.api.read.body import convert_request
from coordinator.api.read.terms import service_terms
from coordinator.api.scoring.objects import (
    Document,
    Ranked,
    Ranking,
    RerankRequest,
    Score,
    ScoreRequest,
    Scores,
)
from coordinator.api.scoring.pairs import ScoredPairs, TextPairs, scored_pairs
from pdserve.shared.errors import InvalidRequest

_Side = str | list[str] | None


@dataclass(frozen=True, slots=True)
class ScoringPlan:
    """A planned call, whose answer is made of a score for each pair."""

    pairs: ScoredPairs
    show: Callable[[list[float], PromptUsage], msgspec.Struct]

    async def run(self, context: ApiContext, trace: RequestTrace) -> WholeAnswer:
        """Run all prompts, and return the answer. Raises what the generations raise."""
        events, headers = await self.pairs.prompts.run(context, trace)
        num_tokens = trace.num_prompt_tokens
        shown = self.show(self.pairs.scores(events), PromptUsage(num_tokens, num_tokens))
        return WholeAnswer(msgspec.json.encode(shown), headers)


async def plan_rerank(ask: Ask) -> ScoringPlan:
    """Plan the order of documents, which the answer repeats. Raises RequestError."""
    return await _rerank(ask, shows_documents=True)


async def plan_bare_rerank(ask: Ask) -> ScoringPlan:
    """Plan the order of documents, told by their indices. Raises RequestError."""
    return await _rerank(ask, shows_documents=False)


async def _rerank(ask: Ask, *, shows_documents: bool) -> ScoringPlan:
    body = convert_request(ask.values, RerankRequest)
    model = await ask.model(body.model)
    terms = service_terms(body, ask.headers, ask.context, ask.trace)
    texts = [one.text if isinstance(one, Document) else one for one in body.documents]
    pairs = TextPairs([body.query], texts, [(0, index) for index in range(len(texts))], "documents")
    if body.return_documents is not None:
        shows_documents = body.return_documents
    answer_id = f"rerank-{ask.trace.unique}"

    def show(scores: list[float], usage: PromptUsage) -> Ranking:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
        results = [
            Ranked(
                index=index,
                relevance_score=scores[index],
                document=Document(texts[index]) if shows_documents else None,
            )
            for index in best
        ]
        return Ranking(id=answer_id, model=body.model, results=results, usage=usage)

    return ScoringPlan(await scored_pairs(pairs, body, model, terms), show)


async def plan_scores(ask: Ask) -> ScoringPlan:
    """Plan a score for each pair. Raises RequestError."""
    body = convert_request(ask.values, ScoreRequest)
    model = await ask.model(body.model)
    terms = service_terms(body, ask.headers, ask.context, ask.trace)
    first = _side("text_1", body.text_1, "queries", body.queries)
    second = _side("text_2", body.text_2, "documents", body.documents)
    number = max(len(first), len(second))
    if len(first) not in (1, number) or len(second) not in (1, number):
        raise InvalidRequest(
            f"'text_1' has {len(first)} texts and 'text_2' {len(second)}; they must be as many, or "
            "one on either side",
            "text_1",
        )
    indices = [(min(i, len(first) - 1), min(i, len(second) - 1)) for i in range(number)]
    planned = await scored_pairs(TextPairs(first, second, indices, "text_2"), body, model, terms)
    answer_id, created = f"score-{ask.trace.unique}", int(time.time())

    def show(scores: list[float], usage: PromptUsage) -> Scores:
        data = [Score(index=index, score=score) for index, score in enumerate(scores)]
        return Scores(id=answer_id, created=created, model=body.model, data=data, usage=usage)

    return ScoringPlan(planned, show)


def _side(name: str, given: _Side, other_name: str, other: _Side) -> list[str]:
    """Return one side's texts, by whichever of its names they came. Raises InvalidRequest."""
    if (given is None) == (other is None):
        raise InvalidRequest(
            f"exactly one of {name!r} and {other_name!r} is needed: a text, or up to "
            f"{MAX_INPUTS} texts",
            name,
        )
    texts = other if given is None else given
    assert texts is not None, "one of them is there"
    return [texts] if isinstance(texts, str) else texts
