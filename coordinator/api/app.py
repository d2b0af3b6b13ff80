"""Builds the HTTP application: its context and its routes."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from functools import partial

from aiohttp import web

from coordinator.api import information
from coordinator.api.body import expect_nothing
from coordinator.api.chat import chat_completions
from coordinator.api.chat_parts import PartsOptions
from coordinator.api.completions import completions
from coordinator.api.config import ApiConfig
from coordinator.api.context import CONTEXT, ApiContext
from coordinator.api.embeddings_api.endpoint import embeddings
from coordinator.api.headers import label
from coordinator.api.middleware import answer_everything
from coordinator.api.observer import NullObserver, Observer
from coordinator.api.openapi import endpoint as openapi_endpoint
from coordinator.api.pace import Pace
from coordinator.api.responses_api import conversations
from coordinator.api.responses_api import endpoint as responses_endpoint
from coordinator.api.responses_api import kept as responses_kept
from coordinator.api.responses_api.compact import compact_conversation
from coordinator.api.responses_api.store import ResponseStore
from coordinator.api.responses_api.websocket import respond_over_websocket
from coordinator.api.tokens import detokenize, tokenize, tokenizer_info
from coordinator.embedding_model import EmbeddingModel
from coordinator.generation import Generator
from coordinator.tenants import Tenants
from coordinator.text import Tokenizer
from coordinator.text.grammars import GrammarChecker
from pdserve import __version__
from pdserve.clock import SystemClock
from pdserve.slo import DEFAULT_CLASS, DEFAULT_CLASSES, ServiceClasses, parse_slo_classes

_post = partial(web.post, expect_handler=expect_nothing)
_RESPONSE = (
    "/v1/responses/{response:(?!(?:input_tokens|compact)$)[^/]+}"  # the excluded names are routes
)
_CONVERSATION = "/v1/conversations/{conversation}"


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    model_names: Sequence[str],
    *,
    config: ApiConfig | None = None,
    observer: Observer | None = None,
    metrics: Callable[[], bytes] = bytes,
    classes: ServiceClasses | None = None,
    tenants: Tenants | None = None,
    embedding_model: EmbeddingModel | None = None,
) -> web.Application:
    """Build the application that serves the whole API on top of `generator`, for `HttpServer`.

    `model_names` are the names that clients may use for the model, its own name first. `metrics`
    returns the body of GET /metrics. `classes` are the service classes (default: pdserve's own).
    `tenants` says who may send requests (default: anybody). `embedding_model` says how
    embeddings are made.
    """
    if not model_names:
        raise ValueError("the model needs a name")
    config = config or ApiConfig()
    clock = SystemClock()
    app = web.Application(middlewares=[answer_everything], client_max_size=config.max_body_bytes)
    app.on_response_prepare.append(label)
    app.on_cleanup.append(_close)
    app[CONTEXT] = ApiContext(
        generator=generator,
        tokenizer=tokenizer,
        model_names=tuple(model_names),
        created=int(time.time()),
        system_fingerprint=config.system_fingerprint or _fingerprint(model_names[0]),
        config=config,
        observer=observer or NullObserver(),
        metrics=metrics,
        classes=classes or parse_slo_classes(DEFAULT_CLASSES, DEFAULT_CLASS),
        tenants=tenants or Tenants(None, None, model_names[0], clock),
        parts=PartsOptions(config.tool_format or tokenizer.tool_format, config.splits_reasoning),
        grammars=GrammarChecker(tokenizer),
        clock=clock,
        pace=Pace(clock),
        stored=ResponseStore(config.max_stored_responses, config.max_stored_bytes),
        embedding_model=embedding_model or EmbeddingModel(),
    )
    app.add_routes(
        [
            _post("/v1/chat/completions", chat_completions),
            _post("/v1/completions", completions),
            _post("/v1/embeddings", embeddings),
            _post("/v1/responses", responses_endpoint.create_response),
            web.get("/v1/responses", respond_over_websocket, allow_head=False),
            _post("/v1/responses/compact", compact_conversation),
            _post("/v1/responses/input_tokens", responses_endpoint.count_input_tokens),
            web.get(_RESPONSE, responses_kept.get_response),
            web.delete(_RESPONSE, responses_kept.delete_response),
            web.get(f"{_RESPONSE}/input_items", responses_kept.list_input_items),
            _post(f"{_RESPONSE}/cancel", responses_kept.cancel_response),
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
        ]
    )
    return app


async def _close(app: web.Application) -> None:
    await app[CONTEXT].grammars.close()


def _fingerprint(model_name: str) -> str:
    digest = hashlib.sha256(f"{model_name}\n{__version__}".encode())
    return f"fp_{digest.hexdigest()[:10]}"
