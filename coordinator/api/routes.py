"""The paths of the API, and what describes them: one row of `openapi` per route."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from aiohttp import web

from coordinator.api import information
from coordinator.api.calls import ENDPOINTS, asked, call, count, either, told
from coordinator.api.messages import models
from coordinator.api.messages.plan import count_tokens
from coordinator.api.openapi.document import DESCRIPTION, get_page
from coordinator.api.openapi.operation import Operation
from coordinator.api.read.body import expect_nothing
from coordinator.api.tokens import detokenize, tokenize

post = partial(web.post, expect_handler=expect_nothing)

ROUTES = (
    *(post(path, call) for path in ENDPOINTS),
    post("/v1/messages/count_tokens", count(count_tokens)),
    web.get("/v1/models", either(asked(information.list_models), asked(models.list_models))),
    web.get("/v1/models/{model:.+}", either(asked(information.get_model), asked(models.get_model))),
    post("/tokenize", count(tokenize)),
    post("/detokenize", count(detokenize)),
    web.get("/tokenizer_info", told(information.tokenizer_info)),
    web.get("/version", told(information.version)),
    web.get("/health", told(information.health)),
    web.get("/metrics", told(information.metrics)),
    web.get("/metrics/targets", told(information.targets)),
    web.get("/status", told(information.status)),
    web.get("/docs", told(get_page)),
)


def add_routes(
    app: web.Application, routes: Iterable[web.RouteDef], operations: Iterable[Operation]
) -> None:
    """Serve these routes, too, and describe them in /openapi.json."""
    app.add_routes(routes)
    app[DESCRIPTION].operations += operations
