"""The operations about the model, the cluster and the API itself."""

from __future__ import annotations

from functools import partial

from coordinator.api.answer.bodies import Model, ModelList
from coordinator.api.information import Health, Version
from coordinator.api.openapi.operation import COUNTS, HTML, METRICS, Operation, in_path
from coordinator.api.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)

_MODEL = in_path("model", "A name of the model; it may contain slashes.")
_tokens = partial(Operation, method="post", errors=COUNTS, tag="Models")
_of_models = partial(Operation, method="get", tag="Models")
_of_cluster = partial(Operation, method="get", tag="Cluster", errors=())
_of_description = partial(Operation, method="get", tag="Description", errors=())

INFORMING = (
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
    ),
    _of_cluster(
        path="/status",
        name="getStatus",
        summary="Get the state of the cluster: its nodes, loads and requests.",
    ),
    _of_description(path="/openapi.json", name="getOpenapi", summary="Get this document."),
    _of_description(
        path="/docs", name="getDocs", summary="Get this document as a web page.", media=HTML
    ),
)
