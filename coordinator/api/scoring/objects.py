"""Bodies and answers of /v1/rerank, as Cohere, Jina and vLLM have it, and of vLLM's /v1/score."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from coordinator.api.embeddings.objects import MAX_INPUTS, PromptUsage
from coordinator.api.read.fields import CallFields, Count

Text = Annotated[str, Meta(min_length=1)]
_Texts: TypeAlias = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class Document(Struct, forbid_unknown_fields=True):
    """A document that is an object."""

    text: Text


class ScoringFields(CallFields, kw_only=True):
    """What both calls have."""

    model: str
    instruction: str | None = None  # to a reranker: what makes a document fit; None: its usual one


class RerankRequest(ScoringFields, kw_only=True):
    """The body of POST /v1/rerank."""

    query: Text
    documents: Annotated[list[Text | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    top_n: Count | None = None  # of the best; None: all
    return_documents: bool | None = None  # None: as the path's other servers do


class Ranked(Struct, kw_only=True, omit_defaults=True):
    """One document's place."""

    index: int  # in the request
    relevance_score: float
    document: Document | None = None


class Ranking(Struct, kw_only=True):
    """The best documents, from the best on."""

    id: str
    model: str
    results: list[Ranked]
    usage: PromptUsage


class ScoreRequest(ScoringFields, kw_only=True):
    """The body of POST /v1/score: pairs of a first and a second text.

    One text on either side stands for as many as there are on the other one.
    """

    text_1: Text | _Texts | None = None
    text_2: Text | _Texts | None = None
    queries: Text | _Texts | None = None  # another name of text_1
    documents: Text | _Texts | None = None  # of text_2


class Score(Struct, kw_only=True):
    """One pair's score."""

    index: int
    object: str = "score"
    score: float


class Scores(Struct, kw_only=True):
    """The scores of all pairs, in their order."""

    id: str
    object: str = "list"
    created: int
    model: str
    data: list[Score]
    usage: PromptUsage
