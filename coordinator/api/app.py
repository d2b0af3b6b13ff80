"""Builds the HTTP application: its context, and its routes (`routes.py`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from coordinator.api.answer.arrivals import WriteTurns
from coordinator.api.calls import CALLS, ENDPOINTS, told
from coordinator.api.config import ApiConfig
from coordinator.api.context import CONTEXT, ApiContext, BeginSpan
from coordinator.api.embeddings.places import PromptPlaces
from coordinator.api.messages import operations as messages
from coordinator.api.observer import NullObserver, Observer
from coordinator.api.openapi.document import DESCRIPTION, Description
from coordinator.api.openapi.operations import OPERATIONS
from coordinator.api.read.body_budget import BodyBudget
from coordinator.api.read.idempotency import KnownKeys
from coordinator.api.routes import ROUTES, add_routes
from coordinator.api.server.middleware import answer_everything, label
from coordinator.models.model import Catalog
from coordinator.tenants import Readers, Tenants
from pdserve.shared.clock import SystemClock
from pdserve.shared.slo import DEFAULT_CLASS, DEFAULT_CLASSES, ServiceClasses, parse_slo_classes


def create_app(
    models: Catalog,
    *,
    config: ApiConfig | None = None,
    observer: Observer | None = None,
    metrics: Callable[[], Awaitable[bytes]] | None = None,
    classes: ServiceClasses | None = None,
    tenants: Tenants | None = None,
    readers: Readers | None = None,
    begin_span: BeginSpan = lambda headers: None,
) -> web.Application:
    """Build the application that serves the API of these models, for `HttpServer`.

    What else is served is added to it: see `add_routes`.

    `metrics` returns the body of GET /metrics. `classes` are the service classes (default:
    pdserve's own). `tenants` says who may send requests (default: anybody), `readers` who may read
    the state of the cluster (default: who has a key, if there are some). `begin_span` begins the
    span of a call with these headers, if it is to be recorded.
    """
    config = config or ApiConfig()
    clock = SystemClock()
    tenants = tenants or Tenants(None, None, models.default.name, clock)
    app = web.Application(middlewares=[answer_everything], client_max_size=config.max_body_bytes)
    app.on_response_prepare.append(label)
    app.on_cleanup.append(_close)
    app[CONTEXT] = ApiContext(
        models=models,
        config=config,
        observer=observer or NullObserver(),
        metrics=metrics or _no_metrics,
        classes=classes or parse_slo_classes(DEFAULT_CLASSES, DEFAULT_CLASS),
        tenants=tenants,
        readers=readers or Readers(tenants),
        clock=clock,
        write_turns=WriteTurns(clock),
        long_turns=WriteTurns(clock, num_per_turn=1),
        prompt_places=PromptPlaces(),
        bodies=BodyBudget(
            config.max_buffered_bytes,
            clock,
            wait_s=config.space_wait_s,
            slow_s=config.slow_sender_s,
        ),
        known_keys=KnownKeys(clock, former_s=config.former_call_s),
        begin_span=begin_span,
    )
    app[CALLS] = dict(ENDPOINTS)
    description = app[DESCRIPTION] = Description()
    routes = [*ROUTES, web.get("/openapi.json", told(description.get))]
    add_routes(app, routes, (*OPERATIONS, *messages.OPERATIONS))
    return app


async def _no_metrics() -> bytes:
    return b""


async def _close(app: web.Application) -> None:
    await app[CONTEXT].models.close()
