"""What may be asked of the API, and what the answers can be: one row for each route."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from coordinator.api.admin import RoleAnswer, RoleRequest
from coordinator.api.embeddings_api.objects import EmbeddingList
from coordinator.api.embeddings_api.requests import EmbeddingRequest
from coordinator.api.information import Health, Version
from coordinator.api.requests import ChatRequest, CompletionRequest
from coordinator.api.responses import ChatChunk, ChatCompletion, Completion, Model, ModelList
from coordinator.api.responses_api.events import StreamEvent
from coordinator.api.responses_api.kept import DEFAULT_ITEMS, MAX_ITEMS
from coordinator.api.responses_api.objects import DeletedResponse, InputTokens, ItemList, Response
from coordinator.api.responses_api.requests import ResponseRequest
from coordinator.api.terms import CLASS_HEADER, TIMEOUT_HEADER
from coordinator.api.tokens import (
    DetokenizeAnswer,
    DetokenizeRequest,
    TokenizeAnswer,
    TokenizeRequest,
    TokenizerInfo,
)

EVENTS = "text/event-stream"
HTML = "text/html"
JSON = "application/json"
METRICS = "text/plain"

NO_CHOICE = (401,)  # what every request with a key can meet
READS_BODY = (400, 401, 404, 408, 413, 415, 503)
GENERATES = (400, 401, 403, 404, 408, 413, 415, 429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class Parameter:
    """In the path, the query or a header."""

    where: str
    name: str
    schema: dict[str, Any]
    description: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    method: str
    path: str
    name: str
    tag: str
    summary: str
    body: type[Struct] | None = None
    examples: tuple[dict[str, Any], ...] = ()  # of bodies
    answer: Any = None  # type of the JSON that is answered; None: any object
    media: str = JSON
    events: Any = None  # type of a stream's events, if it can be streamed
    also: tuple[int, ...] = ()  # further statuses with the same kind of answer
    errors: tuple[int, ...] = NO_CHOICE
    parameters: tuple[Parameter, ...] = ()


_TERMS = (
    Parameter("header", CLASS_HEADER, {"type": "string"}, "The service class."),
    Parameter(
        "header",
        TIMEOUT_HEADER,
        {"type": "number", "exclusiveMinimum": 0},
        "Seconds after which the answer is of no use any more.",
    ),
)
_RESPONSE_ID = Parameter("path", "response", {"type": "string"}, "The response's id.")
_MODEL = Parameter("path", "model", {"type": "string"}, "A name of the model; may have slashes.")
_NOT_STREAMED = Parameter(
    "query", "stream", {"const": "false"}, "A stored response is not streamed."
)

OPERATIONS = (
    Operation(
        method="post",
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
        errors=GENERATES,
        parameters=_TERMS,
    ),
    Operation(
        method="post",
        path="/v1/completions",
        name="createCompletion",
        tag="Generation",
        summary="Continue one prompt or several.",
        body=CompletionRequest,
        examples=({"model": "M", "prompt": "Once upon", "max_tokens": 16},),
        answer=Completion,
        events=Completion,
        errors=GENERATES,
        parameters=_TERMS,
    ),
    Operation(
        method="post",
        path="/v1/responses",
        name="createResponse",
        tag="Generation",
        summary="Answer a conversation in items, or go on from an earlier response.",
        body=ResponseRequest,
        examples=(
            {"model": "M", "input": "Hi", "instructions": "Be brief."},
            {
                "model": "M",
                "input": [
                    {"role": "user", "content": "Rain?"},
                    {
                        "type": "function_call",
                        "call_id": "call_1",
                        "name": "weather",
                        "arguments": "{}",
                    },
                    {"type": "function_call_output", "call_id": "call_1", "output": "No."},
                ],
                "stream": True,
            },
        ),
        answer=Response,
        events=StreamEvent,
        errors=GENERATES,
        parameters=_TERMS,
    ),
    Operation(
        method="post",
        path="/v1/embeddings",
        name="createEmbedding",
        tag="Embeddings",
        summary="A vector for each input.",
        body=EmbeddingRequest,
        examples=(
            {"model": "M", "input": "Once upon"},
            {"model": "M", "input": [[1, 2], [3]], "encoding_format": "base64"},
        ),
        answer=EmbeddingList,
        errors=GENERATES,
        parameters=_TERMS,
    ),
    Operation(
        method="get",
        path="/v1/responses/{response}",
        name="getResponse",
        tag="Generation",
        summary="A response that was stored.",
        answer=Response,
        errors=(400, 401, 404),
        parameters=(_RESPONSE_ID, _NOT_STREAMED),
    ),
    Operation(
        method="delete",
        path="/v1/responses/{response}",
        name="deleteResponse",
        tag="Generation",
        summary="Keep a response no longer.",
        answer=DeletedResponse,
        errors=(401, 404),
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        method="get",
        path="/v1/responses/{response}/input_items",
        name="listInputItems",
        tag="Generation",
        summary="The conversation that a stored response answers, in pages.",
        answer=ItemList,
        errors=(400, 401, 404),
        parameters=(
            _RESPONSE_ID,
            Parameter(
                "query",
                "limit",
                {"type": "integer", "minimum": 1, "maximum": MAX_ITEMS, "default": DEFAULT_ITEMS},
                "Items of a page.",
            ),
            Parameter(
                "query",
                "order",
                {"enum": ["asc", "desc"], "default": "desc"},
                "The oldest or the newest first.",
            ),
            Parameter("query", "after", {"type": "string"}, "The id of the last page's last item."),
        ),
    ),
    Operation(
        method="post",
        path="/v1/responses/{response}/cancel",
        name="cancelResponse",
        tag="Generation",
        summary="Always refused: no response is made in the background.",
        errors=(400, 401, 404),
        parameters=(_RESPONSE_ID,),
    ),
    Operation(
        method="post",
        path="/v1/responses/input_tokens",
        name="countInputTokens",
        tag="Generation",
        summary="How many tokens the model would read.",
        body=ResponseRequest,
        examples=({"model": "M", "input": "Hi"},),
        answer=InputTokens,
        errors=READS_BODY,
    ),
    Operation(
        method="get",
        path="/v1/models",
        name="listModels",
        tag="Models",
        summary="All names of the model that is served.",
        answer=ModelList,
    ),
    Operation(
        method="get",
        path="/v1/models/{model}",
        name="getModel",
        tag="Models",
        summary="One name of the model.",
        answer=Model,
        errors=(401, 404),
        parameters=(_MODEL,),
    ),
    Operation(
        method="post",
        path="/tokenize",
        name="tokenize",
        tag="Models",
        summary="The tokens of a text or of a conversation.",
        body=TokenizeRequest,
        examples=({"prompt": "Once upon", "return_token_strs": True},),
        answer=TokenizeAnswer,
        errors=READS_BODY,
    ),
    Operation(
        method="post",
        path="/detokenize",
        name="detokenize",
        tag="Models",
        summary="The text of tokens.",
        body=DetokenizeRequest,
        examples=({"tokens": [1, 2, 3]},),
        answer=DetokenizeAnswer,
        errors=READS_BODY,
    ),
    Operation(
        method="get",
        path="/tokenizer_info",
        name="getTokenizerInfo",
        tag="Models",
        summary="The special tokens and the chat template.",
        answer=TokenizerInfo,
        errors=(401, 503),
    ),
    Operation(
        method="get",
        path="/version",
        name="getVersion",
        tag="Cluster",
        summary="The version of pdserve.",
        answer=Version,
        errors=(),
    ),
    Operation(
        method="get",
        path="/health",
        name="getHealth",
        tag="Cluster",
        summary="Whether a request could be served now: 200, else 503.",
        answer=Health,
        also=(503,),
        errors=(),
    ),
    Operation(
        method="get",
        path="/metrics",
        name="getMetrics",
        tag="Cluster",
        summary="Metrics in Prometheus' text format.",
        media=METRICS,
        errors=(),
    ),
    Operation(
        method="get",
        path="/status",
        name="getStatus",
        tag="Cluster",
        summary="The cluster as the coordinator sees it, for people and scripts.",
        errors=(),
    ),
    Operation(
        method="post",
        path="/admin/role",
        name="changeRole",
        tag="Cluster",
        summary="Turn a node over to the other pool.",
        body=RoleRequest,
        examples=({"node": "prefill-0", "role": "decode"},),
        answer=RoleAnswer,
        errors=(400, 401, 403, 404, 408, 409, 413, 415, 502, 503, 504),
    ),
    Operation(
        method="get",
        path="/openapi.json",
        name="getOpenapi",
        tag="Description",
        summary="This document.",
        errors=(),
    ),
    Operation(
        method="get",
        path="/docs",
        name="getDocs",
        tag="Description",
        summary="This document as a page.",
        media=HTML,
        errors=(),
    ),
)
