"""The paths of the API. `openapi` describes them: one row per route."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from coordinator.api import information
from coordinator.api.chat import chat_completions
from coordinator.api.completions import completions
from coordinator.api.embeddings.endpoint import embeddings
from coordinator.api.openapi import endpoint as openapi_endpoint
from coordinator.api.read.body import expect_nothing
from coordinator.api.tokens import detokenize, tokenize, tokenizer_info
from coordinator.stateful import conversations, stored_responses
from coordinator.stateful import endpoint as responses_endpoint
from coordinator.stateful.compact import compact_conversation
from coordinator.stateful.websocket import respond_over_websocket

_post = partial(web.post, expect_handler=expect_nothing)
_RESPONSE = (
    "/v1/responses/{response:(?!(?:input_tokens|compact)$)[^/]+}"  # the excluded names are routes
)
_CONVERSATION = "/v1/conversations/{conversation}"

ROUTES = (
    _post("/v1/chat/completions", chat_completions),
    _post("/v1/completions", completions),
    _post("/v1/embeddings", embeddings),
    _post("/v1/responses", responses_endpoint.create_response),
    web.get("/v1/responses", respond_over_websocket, allow_head=False),
    _post("/v1/responses/compact", compact_conversation),
    _post("/v1/responses/input_tokens", responses_endpoint.count_input_tokens),
    web.get(_RESPONSE, stored_responses.get_response),
    web.delete(_RESPONSE, stored_responses.delete_response),
    web.get(f"{_RESPONSE}/input_items", stored_responses.list_input_items),
    _post(f"{_RESPONSE}/cancel", stored_responses.cancel_response),
    _post("/v1/conversations", conversations.create_conversation),
    web.get(_CONVERSATION, conversations.get_conversation),
    _post(_CONVERSATION, conversations.update_conversation),
    web.delete(_CONVERSATION, conversations.delete_conversation),
    _post(f"{_CONVERSATION}/items", conversations.add_items),
    web.get(f"{_CONVERSATION}/items", conversations.list_items),
    web.get(f"{_CONVERSATION}/items/{{item}}", conversations.get_item),
    web.delete(f"{_CONVERSATION}/items/{{item}}", conversations.delete_item),
    web.get("/v1/models", information.list_models),
    web.get("/v1/models/{model:.+}", information.get_model),
    _post("/tokenize", tokenize),
    _post("/detokenize", detokenize),
    web.get("/tokenizer_info", tokenizer_info),
    web.get("/version", information.version),
    web.get("/health", information.health),
    web.get("/metrics", information.metrics),
    web.get("/status", information.status),
    web.get("/openapi.json", openapi_endpoint.get_document),
    web.get("/docs", openapi_endpoint.get_page),
)
