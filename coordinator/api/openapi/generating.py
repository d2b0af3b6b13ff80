"""The operations that run on nodes."""

from __future__ import annotations

from functools import partial

from coordinator.api.answer.bodies import ChatChunk, ChatCompletion, Completion
from coordinator.api.completions import CompletionRequest
from coordinator.api.embeddings.objects import EmbeddingList, EmbeddingRequest
from coordinator.api.openapi.operation import GENERATES, TERMS, Operation
from coordinator.api.read.chat import ChatRequest

_generates = partial(Operation, method="post", errors=GENERATES, parameters=TERMS)

GENERATING = (
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
)
