"""Builds the HTTP application: its context, and its routes (`routes.py`)."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from coordinator.api.answer.write_turns import WriteTurns
from coordinator.api.config import ApiConfig
from coordinator.api.context import CONTEXT, ApiContext, BeginSpan
from coordinator.api.observer import NullObserver, Observer
from coordinator.api.openapi.document import DESCRIPTION, Description
from coordinator.api.openapi.operations import OPERATIONS
from coordinator.api.read.body_budget import BodyBudget
from coordinator.api.read.idempotency import KnownKeys
from coordinator.api.routes import ROUTES, add_routes
from coordinator.api.server.headers import label
from coordinator.api.server.middleware import answer_everything
from coordinator.embedding_model import EmbeddingModel
from coordinator.generation import Generator
from coordinator.tenants import Tenants
from coordinator.text import Tokenizer
from coordinator.text.grammars import GrammarChecker
from pdserve import __version__
from pdserve.clock import SystemClock
from pdserve.slo import DEFAULT_CLASS, DEFAULT_CLASSES, ServiceClasses, parse_slo_classes


def create_app(
    generator: Generator,
    tokenizer: Tokenizer,
    model_names: Sequence[str],
    *,
    config: ApiConfig | None = None,
    observer: Observer | None = None,
    metrics: Callable[[], Awaitable[bytes]] | None = None,
    classes: ServiceClasses | None = None,
    tenants: Tenants | None = None,
    embedding_model: EmbeddingModel | None = None,
    begin_span: BeginSpan = lambda headers: None,
) -> web.Application:
    """Build the application that serves the API on top of `generator`, for `HttpServer`.

    What else is served is added to it: see `add_routes`.

    `model_names` are the names that clients may use for the model, its own name first. `metrics`
    returns the body of GET /metrics. `classes` are the service classes (default: pdserve's own).
    `tenants` says who may send requests (default: anybody). `embedding_model` says how
    embeddings are made. `begin_span` begins the span of a call with these headers, if it is to be
    recorded.
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
        metrics=metrics or _no_metrics,
        classes=classes or parse_slo_classes(DEFAULT_CLASSES, DEFAULT_CLASS),
        tenants=tenants or Tenants(None, None, model_names[0], clock),
        tool_format=config.tool_format or tokenizer.tool_format,
        grammars=GrammarChecker(tokenizer),
        clock=clock,
        write_turns=WriteTurns(clock),
        long_turns=WriteTurns(clock, num_per_turn=1),
        embedding_model=embedding_model or EmbeddingModel(),
        bodies=BodyBudget(config.max_buffered_bytes, clock),
        known_keys=KnownKeys(clock),
        begin_span=begin_span,
    )
    app[DESCRIPTION] = Description()
    add_routes(app, ROUTES, OPERATIONS)
    return app


async def _no_metrics() -> bytes:
    return b""


async def _close(app: web.Application) -> None:
    await app[CONTEXT].grammars.close()
    await app[CONTEXT].tokenizer.close()


def _fingerprint(model_name: str) -> str:
    digest = hashlib.sha256(f"{model_name}\n{__version__}".encode())
    return f"fp_{digest.hexdigest()[:10]}"
