"""The operations of the API: one row per route of `routes`."""

from __future__ import annotations

from functools import partial

from coordinator.api.answer.bodies import ChatChunk, ChatCompletion, Completion, Model, ModelList
from coordinator.api.completions import CompletionRequest
from coordinator.api.embeddings.objects import EmbeddingList, EmbeddingRequest
from coordinator.api.information import Health, Targets, TokenizerInfo, Version
from coordinator.api.openapi.operation import (
    COUNTS,
    GENERATES,
    HTML,
    METRICS,
    TERMS,
    Operation,
    in_path,
)
from coordinator.api.read.chat import ChatRequest
from coordinator.api.scoring.objects import Ranking, RerankRequest, ScoreRequest, Scores
from coordinator.api.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
)
from pdserve.protocol.status import ClusterStatus

_generates = partial(Operation, method="post", errors=GENERATES, parameters=TERMS)
_reranks = partial(
    _generates,
    tag="Scores",
    summary="Order documents by how well they meet a query.",
    body=RerankRequest,
    examples=({"model": "M", "query": "What?", "documents": ["This.", "That."], "top_n": 1},),
    answer=Ranking,
)
_scores = partial(
    _generates,
    tag="Scores",
    summary="Score pairs of texts.",
    body=ScoreRequest,
    examples=({"model": "M", "text_1": "What?", "text_2": ["This.", "That."]},),
    answer=Scores,
)
_MODEL = in_path("model", "A name of the model; it may contain slashes.")
_tokens = partial(Operation, method="post", errors=COUNTS, tag="Models")
_of_models = partial(Operation, method="get", tag="Models")
_of_cluster = partial(Operation, method="get", tag="Cluster", errors=())
_of_description = partial(Operation, method="get", tag="Description", errors=())

OPERATIONS = (
    _generates(
        path="/v1/chat/completions",
        name="createChatCompletion",
        tag="Generation",
        summary="Answer a conversation.",
        body=ChatRequest,
        examples=(
            {"model": "M", "messages": [{"role": "user", "content": "Hi"}]},
            {
                "model": "M",
                "messages": [{"role": "user", "content": "Hi"}],
                "max_completion_tokens": 16,
                "temperature": 0.7,
                "stream": True,
                "stream_options": {"include_usage": True},
            },
        ),
        answer=ChatCompletion,
        events=ChatChunk,
    ),
    _generates(
        path="/v1/completions",
        name="createCompletion",
        tag="Generation",
        summary="Continue one or more prompts.",
        body=CompletionRequest,
        examples=({"model": "M", "prompt": "Once upon", "max_tokens": 16},),
        answer=Completion,
        events=Completion,
    ),
    _generates(
        path="/v1/embeddings",
        name="createEmbedding",
        tag="Embeddings",
        summary="Embed each input as a vector.",
        body=EmbeddingRequest,
        examples=(
            {"model": "M", "input": "Once upon"},
            {"model": "M", "input": [[1, 2], [3]], "encoding_format": "base64"},
        ),
        answer=EmbeddingList,
    ),
    _reranks(path="/v1/rerank", name="rerank"),
    _reranks(path="/rerank", name="rerankUnversioned"),
    _reranks(path="/v2/rerank", name="rerankBare"),
    _scores(path="/v1/score", name="score"),
    _scores(path="/score", name="scoreUnversioned"),
    _of_models(
        path="/v1/models",
        name="listModels",
        summary="List the names of the served model.",
        answer=ModelList,
    ),
    _of_models(
        path="/v1/models/{model}",
        name="getModel",
        summary="Get the model by one of its names.",
        answer=Model,
        errors=(401, 404),
        parameters=(_MODEL,),
    ),
    _tokens(
        path="/tokenize",
        name="tokenize",
        summary="Convert a text or a conversation to tokens.",
        body=TokenizeRequest,
        examples=({"prompt": "Once upon", "return_token_strs": True},),
        answer=TokenizeAnswer,
    ),
    _tokens(
        path="/detokenize",
        name="detokenize",
        summary="Convert tokens to text.",
        body=DetokenizeRequest,
        examples=({"tokens": [1, 2, 3]},),
        answer=DetokenizeAnswer,
    ),
    _of_models(
        path="/tokenizer_info",
        name="getTokenizerInfo",
        summary="Get the special tokens and the chat template.",
        answer=TokenizerInfo,
        errors=(401, 503),
    ),
    _of_cluster(
        path="/version", name="getVersion", summary="Get the version of pdserve.", answer=Version
    ),
    _of_cluster(
        path="/health",
        name="getHealth",
        summary="Check whether requests can be served now: 200 if so, else 503.",
        answer=Health,
        also=(503,),
    ),
    _of_cluster(
        path="/metrics",
        name="getMetrics",
        summary="Get metrics in Prometheus' text format.",
        media=METRICS,
        errors=(401,),
    ),
    _of_cluster(
        path="/metrics/targets",
        name="getMetricsTargets",
        summary="Get where Prometheus finds the metrics of the nodes (http_sd).",
        answer=list[Targets],
        errors=(401,),
    ),
    _of_cluster(
        path="/status",
        name="getStatus",
        summary="Get the state of the cluster: its nodes, loads and requests.",
        answer=ClusterStatus,
        errors=(401,),
    ),
    _of_description(path="/openapi.json", name="getOpenapi", summary="Get this document."),
    _of_description(
        path="/docs", name="getDocs", summary="Get this document as a web page.", media=HTML
    ),
)
