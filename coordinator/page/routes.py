"""The page's paths; one row of `openapi` per route."""

from __future__ import annotations

from aiohttp import web

from coordinator.api.calls import events, told
from coordinator.api.openapi.operation import EVENTS, HTML, Operation
from coordinator.api.routes import add_routes
from coordinator.page.document import get_page
from coordinator.page.live import Live
from coordinator.page.told import News

_OPERATIONS = (
    Operation(
        method="get",
        path="/",
        name="getOverview",
        tag="Cluster",
        summary="Get a web page that shows the cluster.",
        media=HTML,
        errors=(),
    ),
    Operation(
        method="get",
        path="/admin/live",
        name="watchCluster",
        tag="Cluster",
        summary="Watch the cluster: everything once, then what is new every second.",
        media=EVENTS,
        events=News,
        errors=(401, 403, 429),
    ),
)


def add_page_routes(app: web.Application, live: Live) -> None:
    """Serve the page, and what it shows. If API keys are in use, that takes an operator's key."""
    routes = [
        web.get("/", told(get_page)),
        web.get("/admin/live", events(live.watch), allow_head=False),
    ]
    add_routes(app, routes, _OPERATIONS)
